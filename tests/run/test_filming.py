"""Films of episodes: what is in the corner, what is written, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

import freerun
from freerun.core import UserError
from freerun.run.filming import GIF_ADVICE, find_ffmpeg, with_caption
from freerun.tools.cli.main import main

FRAME = np.full((120, 200, 3), 90, np.uint8)


@pytest.fixture
def drone_run(run_dir: Path) -> Path:
    options = {"env_args": {"task": "hover", "episode_seconds": 0.2}, "num_envs": 4, "num_steps_per_env": 8}
    freerun.train("freerun/RoughDrone-v1", **options, total_steps=64, run_dir=run_dir)
    return run_dir


def without_ffmpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.run.filming.find_ffmpeg", lambda: None)


def test_the_caption_is_in_the_corner_and_leaves_the_rest_alone() -> None:
    one, other = with_caption(FRAME, "seed 7   return 1.25"), with_caption(FRAME, "seed 7   return 1.26")
    assert one.shape == FRAME.shape
    assert (one[-20:] > 200).any(), "ink"
    assert (one[-4:, :4] == 45).all(), "a darker ground"
    assert (one[:-20] == 90).all()
    assert not np.array_equal(one, other)
    assert (FRAME == 90).all(), "the environment's own picture is not changed"
    assert with_caption(FRAME[:5, :9], "seed 7").shape == (5, 9, 3)


@pytest.mark.parametrize(("view", "size"), [("above", (320, 392)), ("3d", (560, 360))])
def test_a_gif_has_a_frame_for_the_start_and_each_step(
    view: str, size: tuple[int, int], drone_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    without_ffmpeg(monkeypatch)
    capsys.readouterr()
    film = tmp_path / "film"
    assert main(["eval", str(drone_run), "--episodes", "2", "--render", str(film), "--view", view]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1:] == [str(film / f"episode-{k}.gif") for k in range(2)]
    assert printed.err.strip() == GIF_ADVICE
    with Image.open(film / "episode-0.gif") as picture:
        assert picture.size == size
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)]
    assert len(frames) == 11
    assert len({frame.tobytes() for frame in frames}) == 11
    assert (frames[0][-15:, :100] < 130).all(-1).any(), "the ground of the caption: all else is bright there"


def test_a_gif_keeps_its_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    """Within 8 of 256 levels, in an environment of Gymnasium's own."""
    without_ffmpeg(monkeypatch)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    freerun.train("CartPole-v1", mode="sequential", total_episodes=2, episodes_per_update=2, run_dir=run_dir)
    found = freerun.evaluate(run_dir, episodes=1, render=tmp_path)
    with Image.open(found.pictures[0]) as picture:
        shown = np.asarray(picture.convert("RGB"))
    assert shown.shape == (400, 600, 3)
    assert np.abs(shown[200, 10].astype(int) - 255).max() < 8
    with pytest.raises(UserError, match="CartPole-v1 has one view: leave --view out"):
        freerun.evaluate(run_dir, episodes=1, render=tmp_path, view="3d")


@pytest.mark.skipif(find_ffmpeg() is None, reason="needs ffmpeg or imageio-ffmpeg")
def test_an_mp4_is_written_where_ffmpeg_is_at_hand(drone_run: Path, tmp_path: Path) -> None:
    found = freerun.evaluate(drone_run, episodes=2, render=tmp_path)
    assert [path.name for path in found.pictures] == ["episode-0.mp4", "episode-1.mp4"]
    assert found.pictures[0].read_bytes()[4:8] == b"ftyp"


def test_what_ffmpeg_complains_about_is_told(
    drone_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "ffmpeg"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'no space left on device' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    capsys.readouterr()
    assert main(["eval", str(drone_run), "--episodes", "1", "--render", str(tmp_path / "film")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "episode-0.mp4: no space left on device" in told


def test_views_that_make_no_sense_are_refused(drone_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for words, message in (
        (["--view", "3d"], "give --render, too"),
        (["--view", "below", "--render", str(drone_run / "film")], "has no view 'below': use above or 3d"),
    ):
        assert main(["eval", str(drone_run), "--episodes", "1", *words]) == 2
        assert message in capsys.readouterr().err
