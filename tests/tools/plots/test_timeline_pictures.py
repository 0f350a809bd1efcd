"""Timelines as pixels: how states mix, and the picture that `freerun bench` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from freerun.core import Array, State
from freerun.telemetry.timeline import STATE_NAMES, RecordedTimeline
from freerun.tools.plots.timeline_panels import PICTURE_CELLS, STATE_COLORS, mix_states, write_picture


def cells(**seconds: float) -> Array:
    spent = np.zeros((1, 1, len(State)))
    for name, value in seconds.items():
        spent[0, 0, State[name]] = value
    return spent


def test_colours_mix_by_the_share_of_time() -> None:
    assert mix_states(cells(BUSY=0.2))[0, 0].tolist() == [*STATE_COLORS["busy"][:3], 255]
    assert mix_states(cells())[0, 0].tolist() == [0, 0, 0, 0]  # nothing is known
    # Half busy (opacity 1), half waiting (0.45): opacity 0.725, busy weighs 1 / 1.45 of the colour.
    red, green, blue, opacity = mix_states(cells(BUSY=1.0, WAITING_FOR_WEIGHTS=1.0))[0, 0].tolist()
    assert (red, green, blue) == tuple(
        round((a + 0.45 * b) / 1.45)
        for a, b in zip(STATE_COLORS["busy"][:3], STATE_COLORS["waiting-for-weights"][:3], strict=True)
    )
    assert opacity == 185


def test_a_picture_has_a_row_of_pixels_for_each_track_and_the_learner_on_top(tmp_path: Path) -> None:
    head = {"tracks": ["worker 0", "learner"], "states": STATE_NAMES, "began": 0.0}
    busy, waiting = STATE_NAMES.index("busy"), STATE_NAMES.index("waiting-for-data")
    line = {"at": 2.0, "blocks": [[0, 0.0, busy, 2.0], [1, 0.0, waiting, 2.0]]}
    (tmp_path / "timeline.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")
    recording = RecordedTimeline.of(tmp_path)
    assert recording is not None
    write_picture(recording, 0.5, 1.5, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        pixels = np.asarray(picture)
    assert pixels.shape == (2, PICTURE_CELLS, 4)
    for row, state in enumerate(("waiting-for-data", "busy")):
        *color, opacity = STATE_COLORS[state]
        assert (pixels[row] == [*color, round(255 * opacity)]).all()
