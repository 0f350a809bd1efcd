"""Pictures of NetworkDefence: the hosts in their subnets, red's access to them, the last actions, and the score."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.core import UserError
from freerun_envs.network_hosts import HOSTS, USER0
from freerun_envs.network_red import ESCALATE, EXPLOIT, FAILED, FOUND_NOTHING, IDLE, IMPACT, SCAN, SWEEP

Picture = NDArray[np.uint8]
Colour = tuple[int, int, int]
Rectangle = tuple[float, float, float, float]

WIDTH, HEIGHT = 960, 560
SCALE = 2
"""Pictures are drawn at this scale and reduced at the end, because Pillow does not smooth lines and corners."""
SUBNETS = (
    ("User subnet", tuple(host for host, name in enumerate(HOSTS) if name.startswith("User"))),
    (
        "Enterprise subnet",
        tuple(host for host, name in enumerate(HOSTS) if name.startswith(("Enterprise", "Defender"))),
    ),
    ("Operational subnet", tuple(host for host, name in enumerate(HOSTS) if name.startswith("Op_"))),
)
"""From left to right, in the order in which red advances through them."""
PANEL_TOP, PANEL_WIDTH, PANEL_HEIGHT, PANEL_GAP, MARGIN = 68, 286, 326, 31, 20
CARD_WIDTH, CARD_HEIGHT, CARD_GAP = 128, 86, 8

BACKGROUND, PANEL, LINE = (19, 24, 34), (28, 35, 48), (62, 74, 96)
TEXT, FAINT = (236, 240, 246), (150, 162, 182)
BLUE, RED, GREEN = (78, 161, 255), (255, 96, 96), (86, 204, 132)
ACCESS_COLOURS: tuple[Colour, ...] = (GREEN, (255, 190, 70), RED)
CARD_COLOURS: tuple[Colour, ...] = ((34, 48, 52), (78, 60, 30), (92, 36, 42))
ACCESS_NAMES = ("no access", "user access", "root access")
"""Red's access to a host, by the numbers of `host_status`."""

RED_WORDS = {
    IDLE: "waits",
    IMPACT: "stops the service of {host}",
    SWEEP: "looks for hosts in the {subnet}",
    SCAN: "scans {host}",
    ESCALATE: "takes root on {host}",
    EXPLOIT: "exploits a service of {host}",
}
OUTCOMES = {FAILED: ", in vain", FOUND_NOTHING: ", and finds nothing"}


def describe_red(kind: int, host: int, outcome: int) -> str:
    """Red's attack in a step and its outcome, in words."""
    subnet = next(name for name, hosts in SUBNETS if host in hosts)
    return RED_WORDS[kind].format(host=HOSTS[host], subnet=subnet.lower()) + OUTCOMES.get(outcome, "")


def describe_alert(bits: tuple[int, ...]) -> str:
    """The four bits of a host in words: the activity seen on it, or else the access that blue suspects."""
    activity: dict[tuple[int, ...], str] = {(1, 0): "scan seen", (1, 1): "exploit seen"}
    suspicion: dict[tuple[int, ...], str] = {(1, 0): "access unclear", (0, 1): "suspect: user", (1, 1): "suspect: root"}
    return activity.get(bits[:2], suspicion.get(bits[2:], ""))


@dataclass(frozen=True)
class NetworkView:
    """What a picture shows."""

    red_agent: str
    num_steps: int
    episode_steps: int
    scores: list[float]
    """The cumulated reward at the start and after every step."""
    access: list[int]
    """Red's access by host: 0 none, 1 as a user, 2 root."""
    alerts: list[str]
    """What blue's Monitor reports about each host, or an empty text."""
    num_decoys: list[int]
    blue: str
    blue_host: int | None
    red: str
    red_host: int | None
    is_service_down: bool


def draw(view: NetworkView) -> Picture:
    """Draw the picture as an array [height, width, 3]."""
    try:
        from PIL import Image, ImageDraw
    except ModuleNotFoundError:
        raise UserError("drawing NetworkDefence needs Pillow: pip install 'freerun[render]'") from None
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), BACKGROUND)
    pen = _Pen(ImageDraw.Draw(image))
    _draw_header(pen, view)
    for place, (name, hosts) in enumerate(SUBNETS):
        left = MARGIN + place * (PANEL_WIDTH + PANEL_GAP)
        pen.box((left, PANEL_TOP, left + PANEL_WIDTH, PANEL_TOP + PANEL_HEIGHT), PANEL, radius=12)
        pen.text((left + 14, PANEL_TOP + 20), name, 15, FAINT)
        if place > 0:
            pen.arrow(left - PANEL_GAP + 7, left - 7, PANEL_TOP + PANEL_HEIGHT / 2)
        for index, host in enumerate(hosts):
            column, row = index % 2, index // 2
            x = left + 11 + column * (CARD_WIDTH + CARD_GAP)
            y = PANEL_TOP + 38 + row * (CARD_HEIGHT + CARD_GAP)
            _draw_host(pen, view, host, (x, y, x + CARD_WIDTH, y + CARD_HEIGHT))
    _draw_footer(pen, view)
    _draw_scores(pen, view.scores, view.episode_steps, (MARGIN + 460, 414, WIDTH - MARGIN, 540))
    # BOX averages the SCALE × SCALE pixels that become one.
    small = image.resize((WIDTH, HEIGHT), Image.Resampling.BOX)
    picture: Picture = np.asarray(small)
    return picture


def _draw_header(pen: _Pen, view: NetworkView) -> None:
    pen.text((MARGIN, 26), "Network defence", 22, TEXT)
    pen.text((MARGIN, 50), f"against {view.red_agent}", 14, FAINT)
    pen.text((WIDTH - MARGIN, 28), f"score {_decimal(view.scores[-1])}", 24, TEXT, anchor="rm")
    pen.text((WIDTH - MARGIN, 51), f"step {view.num_steps} of {view.episode_steps}", 14, FAINT, anchor="rm")


def _draw_host(pen: _Pen, view: NetworkView, host: int, box: Rectangle) -> None:
    left, top, right, bottom = box
    access = view.access[host]
    is_blues, is_reds = host == view.blue_host, host == view.red_host
    edge, width = (BLUE, 3) if is_blues else (RED, 3) if is_reds else (ACCESS_COLOURS[access] if access else LINE, 1)
    pen.box(box, CARD_COLOURS[access], radius=8, outline=edge, width=width)
    pen.text((left + 10, top + 17), HOSTS[host], 15, TEXT)
    pen.dot((right - 14, top + 17), 5, ACCESS_COLOURS[access])
    held = "red's foothold" if host == USER0 else ACCESS_NAMES[access]
    pen.text((left + 10, top + 37), held, 13, ACCESS_COLOURS[access])
    if view.alerts[host]:
        pen.text((left + 10, top + 55), view.alerts[host], 13, TEXT)
    for number in range(view.num_decoys[host]):
        pen.diamond((left + 15 + 13 * number, bottom - 13), 5, BLUE)
    if is_blues:
        pen.tag((right - 6, bottom - 12), "blue", BLUE)
    if is_reds:
        pen.tag((right - (48 if is_blues else 6), bottom - 12), "red", RED)


def _draw_footer(pen: _Pen, view: NetworkView) -> None:
    for y, name, words, colour in ((430, "Blue", view.blue, BLUE), (456, "Red", view.red, RED)):
        pen.text((MARGIN, y), name, 17, colour)
        pen.text((MARGIN + 56, y), words, 17, TEXT)
    state, colour = ("is down", RED) if view.is_service_down else ("runs", GREEN)
    pen.dot((MARGIN + 7, 486), 6, colour)
    pen.text((MARGIN + 24, 486), f"The operational service {state}.", 15, TEXT)
    x = float(MARGIN)
    for name, colour in zip(ACCESS_NAMES, ACCESS_COLOURS, strict=True):
        pen.dot((x + 7, 528), 5, colour)
        x = pen.text((x + 20, 528), name, 13, FAINT) + 18
    pen.diamond((x + 5, 528), 5, BLUE)
    pen.text((x + 17, 528), "decoy", 13, FAINT)


def _draw_scores(pen: _Pen, scores: list[float], episode_steps: int, box: Rectangle) -> None:
    """Draw the curve of the score over the steps of the whole episode. The scale ends at the lowest score."""
    pen.box(box, PANEL, radius=8)
    left, top, right, bottom = box[0] + 62, box[1] + 32, box[2] - 16, box[3] - 16
    # At most -1, because the scale divides by it.
    lowest = min(-1.0, *scores)
    pen.text((box[0] + 14, box[1] + 15), "score so far", 13, FAINT)
    for y, score in ((top, 0.0), (bottom, lowest)):
        pen.text((left - 10, y), _decimal(score), 13, FAINT, anchor="rm")
        pen.line([(left, y), (right, y)], LINE, 1)
    across, down = (right - left) / episode_steps, (bottom - top) / lowest
    points = [(left + across * step, top + down * score) for step, score in enumerate(scores)]
    if len(points) > 1:
        pen.line(points, BLUE, 2)
    pen.dot(points[-1], 4, TEXT)


def _decimal(score: float) -> str:
    """One decimal; adding 0.0 turns minus zero into zero."""
    return f"{round(score, 1) + 0.0:.1f}"


@functools.cache
def _font(size: int) -> Any:
    """The font that comes with Pillow, because no other is certain to be installed."""
    from PIL import ImageFont

    return ImageFont.load_default(size * SCALE)


class _Pen:
    """Draws in the units of the finished picture, which is smaller by `SCALE`."""

    def __init__(self, draw: Any):
        self._draw = draw

    def text(self, place: tuple[float, float], words: str, size: int, colour: Colour, anchor: str = "lm") -> float:
        """Write a text; return the x coordinate of its end."""
        x, y = place
        self._draw.text((x * SCALE, y * SCALE), words, colour, _font(size), anchor)
        return x + float(self._draw.textlength(words, _font(size))) / SCALE

    def box(self, box: Rectangle, fill: Colour, radius: int, outline: Colour | None = None, width: int = 1) -> None:
        scaled = [number * SCALE for number in box]
        self._draw.rounded_rectangle(scaled, radius * SCALE, fill, outline, width * SCALE)

    def dot(self, centre: tuple[float, float], radius: float, colour: Colour) -> None:
        x, y = centre
        box = (x - radius, y - radius, x + radius, y + radius)
        self._draw.ellipse([number * SCALE for number in box], colour)

    def diamond(self, centre: tuple[float, float], radius: float, colour: Colour) -> None:
        x, y = centre
        corners = ((x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y))
        self._draw.polygon([(a * SCALE, b * SCALE) for a, b in corners], colour)

    def line(self, points: list[tuple[float, float]], colour: Colour, width: int) -> None:
        self._draw.line([(x * SCALE, y * SCALE) for x, y in points], colour, width * SCALE, joint="curve")

    def arrow(self, left: float, right: float, y: float) -> None:
        self.line([(left, y), (right - 5, y)], LINE, 2)
        corners = ((right, y), (right - 8, y - 5), (right - 8, y + 5))
        self._draw.polygon([(a * SCALE, b * SCALE) for a, b in corners], LINE)

    def tag(self, right_middle: tuple[float, float], words: str, colour: Colour) -> None:
        right, y = right_middle
        width = float(self._draw.textlength(words, _font(12))) / SCALE + 12
        self.box((right - width, y - 9, right, y + 8), colour, radius=6)
        self.text((right - width / 2, y - 1), words, 12, BACKGROUND, anchor="mm")
