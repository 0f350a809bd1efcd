"""Learning curves, timelines and scaling: the numbers of a plot, and the files that are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from watch_server import write_run

from freerun.core import State, UserError
from freerun.tools.cli.main import main
from freerun.tools.plots import learning_curves
from freerun.tools.plots.drawing import draw
from freerun.tools.plots.panels import find_runs, scaling
from freerun.tools.plots.timeline_panels import STATE_COLORS, mix_states, timelines


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
    (panel,) = learning_curves.curves(runs, "return_mean", "step")
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
    (panel,) = learning_curves.curves(seeds(tmp_path, {0: [1.0, 2.0, 3.0], 1: [1.0, 2.0]}), "return_mean", "step")
    assert (panel.lines[0].x[0], panel.lines[0].x[-1]) == (100, 200)
    np.testing.assert_allclose(panel.lines[0].y[[0, -1]], [1.0, 2.0])


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    (panel,) = learning_curves.curves(seeds(tmp_path, {0: [1.0, 5.0]}), "return_mean", "step")
    (line,) = panel.lines
    assert (line.x.tolist(), line.y.tolist(), line.low) == ([100, 200], [1.0, 5.0], None)


def test_modes_are_lines_and_environments_panels(tmp_path: Path) -> None:
    runs = seeds(tmp_path / "a", {0: [1.0], 1: [2.0]}) + seeds(tmp_path / "a", {0: [1.0]}, mode="sync")
    runs += seeds(tmp_path / "b", {0: [1.0]}, env="Other-v0")
    panels = learning_curves.curves(runs, "return_mean", "step")
    assert [panel.title for panel in panels] == ["CartPole-v1", "Other-v0"]
    assert [line.name for line in panels[0].lines] == ["freerun (2 seeds)", "sync (1 seed)"]


def test_a_setting_that_differs_names_the_line(tmp_path: Path) -> None:
    runs = seeds(tmp_path / "a", {0: [1.0]}, learning_rate=0.1) + seeds(tmp_path / "b", {0: [1.0]}, learning_rate=0.2)
    (panel,) = learning_curves.curves(runs, "return_mean", "step")
    assert [line.name for line in panel.lines] == ["learning_rate=0.1 (1 seed)", "learning_rate=0.2 (1 seed)"]


def test_runs_of_one_mode_with_other_settings_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    runs = seeds(tmp_path / "a", {0: [1.0]}, learning_rate=0.1) + seeds(tmp_path / "b", {0: [9.0]}, learning_rate=0.2)
    runs += seeds(tmp_path / "c", {0: [1.0]}, mode="sync", learning_rate=0.1)
    (panel,) = learning_curves.curves(runs, "return_mean", "step")
    assert [line.name for line in panel.lines] == [
        "freerun learning_rate=0.1 (1 seed)",
        "freerun learning_rate=0.2 (1 seed)",
        "sync learning_rate=0.1 (1 seed)",
    ]


def test_a_metric_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metric nonsense; it has return_mean, step$"):
        learning_curves.curves(seeds(tmp_path, {0: [1.0]}), "nonsense", "step")


def without_an_episode(path: Path) -> Path:
    write_run(path, seed=9)
    record = {"step": 100, "episodes": 0, "return_mean": None, "steps_per_second": 7.0}
    (path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return path


def test_a_run_without_an_episode_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = [*seeds(tmp_path, {0: [1.0, 5.0]}), without_an_episode(tmp_path / "short")]
    (panel,) = learning_curves.curves(runs, "return_mean", "step")
    assert [(line.name, line.y.tolist()) for line in panel.lines] == [("freerun (1 seed)", [1.0, 5.0])]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == f"left out: {tmp_path / 'short'} has no value of return_mean, because no episode has ended in it"


def test_where_no_run_is_left_the_error_does_not_list_what_is_missing(tmp_path: Path) -> None:
    run = without_an_episode(tmp_path / "short")
    with pytest.raises(UserError, match="because no episode has ended in it") as told:
        learning_curves.curves([run], "return_mean", "step")
    assert "it has " not in str(told.value)
    other = without_an_episode(tmp_path / "other")
    with pytest.raises(UserError, match=r"^none of these 2 runs can be drawn; the first: .*short has no value of"):
        learning_curves.curves([run, other], "return_mean", "step")


@pytest.mark.parametrize(("what", "lacking"), [("timeline", "timeline.jsonl"), ("scaling", "summary.json")])
def test_a_run_that_lacks_a_file_is_left_out_with_a_warning(
    what: str, lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("whole", "begun"):
        path = write_run(tmp_path / name)
        (path / "summary.json").write_text(json.dumps({"mode": "sync", "num_workers": 1, "steps_per_second": 1.0}))
    (tmp_path / "begun" / lacking).unlink()
    assert main(["plot", str(tmp_path), "--what", what, "-o", str(tmp_path / "out.png")]) == 0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("left out: ")
    assert str(tmp_path / "begun") in warning
    assert (tmp_path / "out.png").is_file()


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
    for row, state in ((2, State.BUSY), (0, State.WAITING_FOR_DATA)):
        (pixel,) = mix_states(np.eye(len(State))[state].reshape(1, 1, -1))[0]
        assert (first.rows.pixels[row] == pixel).all()


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


def test_scaling_has_a_line_for_every_environment(tmp_path: Path) -> None:
    for env, mode, num_workers, rate in (
        ("A-v0", "sync", 1, 10.0),
        ("A-v0", "sync", 2, 20.0),
        ("B-v0", "sync", 2, 900.0),
        ("B-v0", "freerun", 4, 1800.0),
    ):
        path = write_run(tmp_path / f"{env}-{mode}-{num_workers}")
        summary = {"env": env, "algo": "ppo", "mode": mode, "num_workers": num_workers, "steps_per_second": rate}
        (path / "summary.json").write_text(json.dumps(summary))
    (panel,) = scaling(find_runs([tmp_path]))
    assert [(line.name, line.x.tolist(), line.y.tolist()) for line in panel.lines] == [
        ("A-v0, sync", [1, 2], [10.0, 20.0]),
        ("B-v0, freerun", [4], [1800.0]),
        ("B-v0, sync", [2], [900.0]),
    ]
    output = tmp_path / "out.svg"
    draw([panel], output)
    assert all(f"<!-- {line.name} -->" in output.read_text() for line in panel.lines), "they stand in the legend"


def test_a_timeline_as_a_page_has_a_legend(tmp_path: Path) -> None:
    draw(timelines([write_run(tmp_path / "one"), write_run(tmp_path / "two")]), tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    for name, color in STATE_COLORS.items():
        assert text.count(f'"name":"{name}"') == 1
        assert f'"color":"rgba{color}"'.replace(" ", "") in text.replace(" ", "")


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
        ([str(other), "-o", "x.png"], "config.json does not describe a run"),
        ([str(begun), "-o", "x.png"], "metrics.jsonl is missing"),
        ([str(tmp_path / "run"), "-o", str(tmp_path / "x.gif")], "must end in .png"),
        ([str(tmp_path / "run"), "-o", str(tmp_path / "no" / "x.png")], "cannot write"),
    ):
        assert main(["plot", *words]) == 2
        assert said in capsys.readouterr().err
