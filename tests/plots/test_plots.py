"""Curves with bands over seeds, timelines, scaling: the numbers behind a picture, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from watch_server import write_run

from freerun.cli import main
from freerun.core import UserError
from freerun.plots import learning
from freerun.plots.panels import STATE_COLORS, find_runs, scaling, timelines


def seeds(folder: Path, returns: dict[int, list[float]], **config: Any) -> list[Path]:
    """A run per seed, with these returns at steps 100, 200, …"""
    paths = []
    for seed, values in returns.items():
        path = write_run(folder / f"{config.get('mode', 'freerun')}-{seed}", seed=seed, **config)
        lines = [json.dumps({"step": 100 * (place + 1), "return_mean": value}) for place, value in enumerate(values)]
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        paths.append(path)
    return paths


def test_a_curve_is_the_interquartile_mean_over_seeds(tmp_path: Path) -> None:
    """Of 0, 10, 20, 90 a quarter is cut off at each end: (10 + 20) / 2."""
    runs = seeds(tmp_path, {0: [0.0, 0.0], 1: [10.0, 10.0], 2: [20.0, 20.0], 3: [90.0, 90.0]})
    (panel,) = learning.curves(runs, "return_mean", "step")
    (line,) = panel.lines
    assert (panel.title, line.name) == ("CartPole-v1", "freerun (4 seeds)")
    np.testing.assert_allclose(line.y, 15.0)
    assert line.low is not None
    assert line.high is not None
    assert (line.low < 15).all()
    assert (line.high > 15).all()
    assert line.low[0] >= 0
    assert line.high[0] <= 90


def test_a_line_reaches_as_far_as_all_its_seeds(tmp_path: Path) -> None:
    (panel,) = learning.curves(seeds(tmp_path, {0: [1.0, 2.0, 3.0], 1: [1.0, 2.0]}), "return_mean", "step")
    assert (panel.lines[0].x[0], panel.lines[0].x[-1]) == (100, 200)
    np.testing.assert_allclose(panel.lines[0].y[[0, -1]], [1.0, 2.0])


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    (panel,) = learning.curves(seeds(tmp_path, {0: [1.0, 5.0]}), "return_mean", "step")
    (line,) = panel.lines
    assert (line.x.tolist(), line.y.tolist(), line.low) == ([100, 200], [1.0, 5.0], None)


def test_modes_are_lines_and_environments_panels(tmp_path: Path) -> None:
    runs = seeds(tmp_path / "a", {0: [1.0], 1: [2.0]}) + seeds(tmp_path / "a", {0: [1.0]}, mode="sync")
    runs += seeds(tmp_path / "b", {0: [1.0]}, env="Other-v0")
    panels = learning.curves(runs, "return_mean", "step")
    assert [panel.title for panel in panels] == ["CartPole-v1", "Other-v0"]
    assert [line.name for line in panels[0].lines] == ["freerun (2 seeds)", "sync (1 seed)"]


def test_a_setting_that_differs_names_the_line(tmp_path: Path) -> None:
    runs = seeds(tmp_path / "a", {0: [1.0]}, learning_rate=0.1) + seeds(tmp_path / "b", {0: [1.0]}, learning_rate=0.2)
    (panel,) = learning.curves(runs, "return_mean", "step")
    assert [line.name for line in panel.lines] == ["learning_rate=0.1 (1 seed)", "learning_rate=0.2 (1 seed)"]


def test_a_metric_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no nonsense by step: its metrics are return_mean, step"):
        learning.curves(seeds(tmp_path, {0: [1.0]}), "nonsense", "step")


def test_timelines_stand_side_by_side_over_the_same_time(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", mode="sync")
    with (other / "timeline.jsonl").open("a") as file:
        file.write(json.dumps({"at": 10.0, "blocks": [[0, 2.0, 0, 8.0]]}) + "\n")
    first, second = timelines([one, other])
    assert first.rows is not None
    assert second.rows is not None
    assert (first.rows.seconds, second.rows.seconds) == (2.0, 2.0)
    assert first.rows.names == ["learner", "worker 0", "worker 1"]
    assert first.title == "freerun: workers 88% busy"
    assert (first.rows.colors[2] == STATE_COLORS["busy"]).all()
    assert (first.rows.colors[0] == STATE_COLORS["waiting-for-data"]).all()


def test_scaling_is_steps_per_second_by_workers(tmp_path: Path) -> None:
    for mode, num_workers, rate in (("sync", 1, 10.0), ("sync", 4, 20.0), ("freerun", 4, 30.0), ("freerun", 4, 50.0)):
        path = write_run(tmp_path / f"{mode}-{num_workers}-{rate}")
        summary = {"mode": mode, "num_workers": num_workers, "steps_per_second": rate}
        (path / "summary.json").write_text(json.dumps(summary))
    (panel,) = scaling(find_runs([tmp_path]))
    assert [(line.name, line.x.tolist(), line.y.tolist()) for line in panel.lines] == [
        ("freerun", [4], [40.0]),
        ("sync", [1, 4], [10.0, 20.0]),
    ]


@pytest.mark.parametrize("what", ["curves", "timeline"])
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_it_is_drawn(what: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds(tmp_path / "runs", {0: [1.0, 2.0], 1: [2.0, 3.0]})
    output = tmp_path / f"out.{suffix}"
    assert main(["plot", str(tmp_path / "runs"), "-o", str(output), "--what", what]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    if suffix == "png":
        with Image.open(output) as picture:
            assert len(picture.convert("RGB").getcolors(1_000_000) or []) > 50
    else:
        text = output.read_text()
        assert "freerun" in text
        assert 'src="http' not in text  # a page that needs no network


def test_what_cannot_be_drawn_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    begun = tmp_path / "begun" / "run"
    begun.mkdir(parents=True)
    (begun / "config.json").write_text('{"env": "CartPole-v1", "mode": "freerun"}')
    for words, said in (
        ([str(tmp_path / "none"), "-o", "x.png"], "holds no run"),
        ([str(other), "-o", "x.png"], "config.json is none of a run"),
        ([str(begun), "-o", "x.png"], "metrics.jsonl is missing"),
        ([str(tmp_path / "run"), "-o", str(tmp_path / "x.gif")], "must end in .png"),
        ([str(tmp_path / "run"), "-o", str(tmp_path / "no" / "x.png")], "cannot write"),
    ):
        assert main(["plot", *words]) == 2
        assert said in capsys.readouterr().err
