"""Line charts as SVG whose colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from freerun.benching.noise import Range

WIDTH, HEIGHT = 500, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 44
NUM_COLORS = 9


@dataclass(frozen=True)
class Line:
    name: str
    color: str
    """A variable of the style sheet."""
    points: tuple[tuple[int, Range], ...]
    dashed: bool = False


def color(place: int) -> str:
    return f"--line-{place % NUM_COLORS}"


def chart(lines: Sequence[Line], workers: Sequence[int], y_label: str, is_share: bool) -> str:
    """By the number of workers, which grows by factors; so does a rate, while a share begins at 0."""
    values = [value for line in lines for _, rate in line.points for value in (rate.low, rate.high) if value > 0]
    if is_share:
        top = max(1.0, *values)
        ticks, place = [0.25 * number for number in range(math.floor(4 * top) + 1)], _linear(0.0, top)
    else:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        ticks, place = [10.0**power for power in range(low, max(high, low + 1) + 1)], _factors(low, max(high, low + 1))
    across = _factors(math.log10(min(workers)), math.log10(max(workers)))

    def x(num_workers: int) -> float:
        return LEFT + across(num_workers) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - place(value) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">']
    for tick in ticks:
        shown = f"{100 * tick:.0f} %" if is_share else f"{tick:,.0f}" if tick < 10_000 else f"{tick / 1000:,.0f}k"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{shown}</text>')
    below = HEIGHT - BOTTOM + 18
    parts += [f'<text x="{x(number):.1f}" y="{below}" text-anchor="middle">{number}</text>' for number in workers]
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">workers</text>')
    parts += [_drawn(line, x, y, is_share) for line in lines]
    return "".join([*parts, "</svg>"])


def _drawn(line: Line, x: Callable[[int], float], y: Callable[[float], float], is_share: bool) -> str:
    stroke = f'style="stroke: var({line.color})"'
    path = " ".join(f"{x(number):.1f},{y(rate.middle):.1f}" for number, rate in line.points)
    parts = [f'<polyline class="line{" dash" if line.dashed else ""}" {stroke} points="{path}"/>']
    for number, rate in line.points:
        shown = f"{100 * rate.middle:.0f} %" if is_share else f"{rate.middle:,.0f}"
        title = f"<title>{escape(line.name)}, {number} workers: {shown}</title>"
        at = f"{x(number):.1f}"
        parts.append(
            f'<line class="whisker" {stroke} x1="{at}" x2="{at}" y1="{y(rate.low):.1f}" y2="{y(rate.high):.1f}"/>'
        )
        fill = f'style="fill: var({line.color})"'
        parts.append(f'<circle {fill} cx="{at}" cy="{y(rate.middle):.1f}" r="3.5">{title}</circle>')
    return "".join(parts)


def _linear(low: float, high: float) -> Callable[[float], float]:
    return lambda value: (value - low) / (high - low)


def _factors(low: float, high: float) -> Callable[[float], float]:
    """Between two powers of ten."""
    width = high - low or 1.0
    return lambda value: (math.log10(max(value, 1e-9)) - low) / width
