"""Films of episodes: frames with the episode's seed and return in a corner, as mp4 or as GIF."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from freerun.adapters.env_adapter import EnvAdapter
from freerun.adapters.gymnasium_envs import NO_PICTURES, GymnasiumFactory
from freerun.core import UserError

Frame = NDArray[np.uint8]
"""[rows, columns, 3]."""
DEFAULT_FPS = 25
"""Frames per second of a film, if the environment's metadata have no render_fps."""
SHORTEST_FRAME_MILLISECONDS = 20
"""Programs that show GIFs slow down films whose frames are shorter than this."""
GIF_ADVICE = "No ffmpeg was found, so the films are GIFs: put ffmpeg on the PATH or pip install imageio-ffmpeg for mp4"
NUM_COLOURS = 256
"""That a GIF may have."""
BITS = 5
"""Of each of red, green and blue that a GIF's colours are told apart by."""


class Film(Protocol):
    """A file that frames are added to."""

    suffix: str

    def add(self, frame: Frame) -> None: ...

    def finish(self) -> None:
        """Complete the file."""


class Camera:
    """Films the episodes of an environment, each into a file of its own."""

    def __init__(self, factory: GymnasiumFactory, folder: Path, view: str | None = None):
        try:
            import PIL  # noqa: F401
        except ModuleNotFoundError:
            raise UserError("--render needs Pillow: pip install 'freerun[render]'") from None
        drawing = _drawing_env(factory, view)
        self._fps = int(drawing.env.metadata.get("render_fps") or DEFAULT_FPS)
        self._filmed = _FilmedEnv(drawing.env, self)
        self.env = EnvAdapter(self._filmed, factory.policy_group_only, mask_source=factory.mask_source)
        self._folder = folder
        self._ffmpeg = find_ffmpeg()
        self._film: Film | None = None
        self._paths: list[Path] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder to --render") from None

    def shoot(self, frame: Frame, caption: str) -> None:
        """Add a frame to the film of the current episode. The first frame begins the film."""
        frame = with_caption(frame, caption)
        if self._film is None:
            path = self._folder / f"episode-{len(self._paths)}"
            self._film = _Mp4(path, frame, self._fps, self._ffmpeg) if self._ffmpeg else _Gif(path, self._fps)
            self._paths.append(path.with_suffix(self._film.suffix))
        self._film.add(frame)

    def save(self) -> Path:
        """Complete the film of the episode that has just ended."""
        film, self._film = self._film, None
        if film is not None:
            film.finish()
        return self._paths[-1]

    def close(self) -> None:
        """Complete the film of an episode that was interrupted."""
        if self._film is not None:
            self.save()


class _FilmedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws a frame after each reset and each step."""

    def __init__(self, env: gymnasium.Env[Any, Any], camera: Camera):
        super().__init__(env)
        self._camera = camera
        self._seed: int | None = None
        self._return = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        self._seed, self._return = seed, 0.0
        self._shoot()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._return += float(result[1])
        self._shoot()
        return result

    def _shoot(self) -> None:
        frame: Any = self.env.render()
        self._camera.shoot(frame, f"seed {self._seed}   return {self._return:.2f}")


def _drawing_env(factory: GymnasiumFactory, view: str | None) -> EnvAdapter:
    """Make an environment that draws. It draws once for a trial, because some accept the render_mode and draw
    nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium warns about what is refused below
        if view is not None:
            _check_view(factory, view)
        env = factory.make_one(render_mode="rgb_array", **({} if view is None else {"view": view}))
        env.reset(seed=0)
        try:
            picture: Any = env.env.render()
        except NotImplementedError:
            picture = None
        except gymnasium.error.DependencyNotInstalled as error:
            raise UserError(f"--render needs something that is not installed: {error}") from None
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        env.close()
        raise UserError(f"{NO_PICTURES} (its render() returns no array for render_mode 'rgb_array')")
    return env


def _check_view(factory: GymnasiumFactory, view: str) -> None:
    """Environments that can be seen in several ways list them in their metadata, and take one as `view`."""
    env = factory.make_one()
    views = env.env.metadata.get("views") or []
    env.close()
    if not views:
        raise UserError(f"{factory.env} has one view: leave --view out")
    if view not in views:
        raise UserError(f"{factory.env} has no view {view!r}: use {' or '.join(views)}")


# ---------------------------------------------------------------------------------------------- what is written


def with_caption(frame: Frame, text: str) -> Frame:
    """A copy of the frame with a line of text in its lower left corner, on a darker ground.

    Titles and scores of environments mostly stand at the top.
    """
    from PIL import Image, ImageDraw

    font = _font(max(9.0, frame.shape[0] / 32))
    left, top, right, bottom = font.getbbox(text)
    paper = Image.new("L", (round(right - left) + 8, round(bottom - top) + 6))
    ImageDraw.Draw(paper).text((4 - left, 3 - top), text, fill=255, font=font)
    captioned = np.array(frame)
    # A frame that is smaller than the text shows its first part.
    corner = captioned[-paper.height :, : paper.width]
    ink = np.asarray(paper, np.uint16)[: corner.shape[0], : corner.shape[1], None]
    # Half as bright where there is no ink, and white where there is.
    corner[:] = (corner // 2 * (255 - ink) + 255 * ink) // 255
    return captioned


@functools.cache
def _font(size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def find_ffmpeg() -> str | None:
    """The program that writes mp4: ffmpeg of the PATH, or of the package imageio-ffmpeg; None if neither is there."""
    found = shutil.which("ffmpeg")
    if found is None:
        try:
            import imageio_ffmpeg

            found = imageio_ffmpeg.get_ffmpeg_exe()
        except (ImportError, RuntimeError):  # RuntimeError: the package is there, but without its program
            return None
    return found


class _Mp4:
    """Frames go to ffmpeg as they come, so that it encodes while the episode goes on and nothing is kept."""

    suffix = ".mp4"

    def __init__(self, path: Path, first: Frame, fps: int, ffmpeg: str):
        self._path = path.with_suffix(self.suffix)
        rows, columns = first.shape[:2]
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{columns}x{rows}", "-r", str(fps), "-i", "-"]
        # yuv420p is what browsers play; it halves the resolution of colours, so both sides have to be even.
        result = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it is open for as long as ffmpeg runs)
        command = [ffmpeg, "-loglevel", "error", "-y", *source, *result, str(self._path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._errors)
        assert self._process.stdin is not None
        self._frames = self._process.stdin
        self._has_given_up = False

    def add(self, frame: Frame) -> None:
        if self._has_given_up:
            return
        try:
            self._frames.write(np.ascontiguousarray(frame).data)
        except BrokenPipeError:
            # ffmpeg has given up. `finish` tells why: an error in here would look like one of the environment.
            self._has_given_up = True

    def finish(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # what was left to write goes nowhere
            self._frames.close()
        failed = self._process.wait() != 0
        self._errors.seek(0)
        told = self._errors.read().decode(errors="replace").strip()
        self._errors.close()
        if failed:
            raise UserError(
                f"ffmpeg could not write {self._path}: {told.splitlines()[-1] if told else 'no reason given'}"
            )


class _Gif:
    """Frames are kept as 15-bit colours until the episode has ended, for one palette that fits all of them.

    With a palette for each frame, Pillow takes 30 times as long."""

    suffix = ".gif"

    def __init__(self, path: Path, fps: int):
        self._path = path.with_suffix(self.suffix)
        self._milliseconds = max(SHORTEST_FRAME_MILLISECONDS, round(1000 / fps))
        self._frames: list[NDArray[np.uint16]] = []

    def add(self, frame: Frame) -> None:
        red, green, blue = (frame[..., k].astype(np.uint16) >> 8 - BITS for k in range(3))
        self._frames.append((red << 2 * BITS | green << BITS | blue).astype(np.uint16))

    def finish(self) -> None:
        from PIL import Image

        is_used = np.zeros(1 << 3 * BITS, bool)
        for frame in self._frames:
            is_used[frame] = True
        used = np.flatnonzero(is_used)
        parts = [(used >> shift & (1 << BITS) - 1) << 8 - BITS for shift in (2 * BITS, BITS, 0)]
        colours = Image.fromarray(np.stack(parts, -1).astype(np.uint8)[None])
        palette = colours.quantize(NUM_COLOURS, dither=Image.Dither.NONE)
        index = np.zeros(len(is_used), np.uint8)
        index[used] = np.asarray(palette)[0]
        pictures = [Image.fromarray(index[frame]) for frame in self._frames]
        table = bytes(palette.getpalette() or ())
        for picture in pictures:
            picture.putpalette(table)
        # loop=0: the film is shown again and again. optimize=False: otherwise every frame gets a palette of its own.
        options: dict[str, Any] = {"save_all": True, "loop": 0, "optimize": False}
        pictures[0].save(self._path, append_images=pictures[1:], duration=self._milliseconds, **options)
