"""A tracker that is defined here and nowhere in freerun: every command knows it by its name and its traits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import freerun
from freerun.core import RequiredPackage, TrackerTraits, UserError
from freerun.run.replay_run import replay
from freerun.settings import registry
from freerun.settings.named_code import code_in
from freerun.settings.registry import TrackerEntry
from freerun.telemetry.tracking import TrackedRun
from freerun.tools.cli.main import main

ENV = "toy_envs:OneBit"
SMALL: dict[str, Any] = {
    "mode": "sequential", "episodes_per_update": 2, "total_episodes": 4, "num_epochs": 1, "quiet": True,
}  # fmt: skip


class Notebook:
    """Writes every record into a notebook in the run folder."""

    def __init__(self, run: TrackedRun):
        self._file = (run.path / "notebook.jsonl").open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        print(json.dumps({"step": step, **metrics}), file=self._file)

    def close(self) -> None:
        self._file.close()


class Elsewhere(Notebook):
    traits = TrackerTraits(description="sends records elsewhere", destination_setting="wandb_project")


class Lacking(Notebook):
    traits = TrackerTraits(package=RequiredPackage("no_such_package", "a package", "tensorboard"))


class Mute:
    """It lacks what a tracker needs."""


NAME = f"{__name__}:Notebook"


def test_a_run_is_tracked_resumed_and_replayed(run_dir: Path) -> None:
    freerun.train(ENV, track=(Notebook,), run_dir=run_dir, **SMALL)
    assert json.loads((run_dir / "config.json").read_text())["track"] == [NAME]
    freerun.resume(run_dir, total_episodes=8)
    records = [json.loads(line) for line in (run_dir / "notebook.jsonl").read_text().splitlines()]
    assert [record["update"] for record in records] == [1, 2, 3, 4]
    assert replay(run_dir).is_same


def test_it_is_named_on_the_command_line_beside_others(run_dir: Path) -> None:
    words = ["--mode", "sequential", "--total-episodes", "4", "--episodes-per-update", "2", "-q"]
    both = ["--track", NAME, "--track", "tensorboard"]
    assert main(["train", ENV, *words, *both, "--run-dir", str(run_dir)]) == 0
    assert (run_dir / "notebook.jsonl").is_file()
    assert list(run_dir.glob("events.out.tfevents.*"))


def test_a_folder_from_elsewhere_does_not_import_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freerun.train(ENV, run_dir=run_dir, **SMALL)
    trap, mark = tmp_path / "freerun_trap.py", tmp_path / "mark"
    trap.write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**config, "track": ["freerun_trap:Trap"]}))
    for words in (["train", "--config", str(run_dir / "config.json")], ["replay", str(run_dir)]):
        assert main(words) == 2
        assert "freerun_trap:Trap" in capsys.readouterr().err
    assert not mark.exists()


def test_where_it_sends_data_needs_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TRACKERS, "elsewhere", TrackerEntry(f"{__name__}:Elsewhere"))
    assert code_in({"track": ["elsewhere"], "wandb_project": "theirs"}) == ["theirs"]
    assert code_in({"track": [], "wandb_project": "theirs"}) == []


def test_a_line_in_the_registry_puts_it_on_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry.TRACKERS, "notebook", TrackerEntry(NAME))
    assert main(["list"]) == 0
    assert "notebook     Writes every record into a notebook in the run folder." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("track", "sentence"),
    [
        (Mute, "has no write, no close: docs/watching.md says what it needs"),
        (Lacking, r"--track .*:Lacking needs a package: pip install 'freerun\[tensorboard\]'"),
        ("no_such_module:Tracker", "tracker 'no_such_module:Tracker': No module"),
        ("tensorbord", "there is no tracker 'tensorbord': did you mean tensorboard"),
    ],
)
def test_what_will_not_do_is_said_in_a_sentence(track: Any, sentence: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        freerun.train(ENV, track=(track,), run_dir=run_dir, **SMALL)
    assert not run_dir.exists()
