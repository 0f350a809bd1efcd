"""benchmarks/sample_efficiency.py keeps every result that was not run again, in its file and in its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sample_efficiency

    return sample_efficiency


def record(task: str, system: str, seed: int, score: float) -> dict[str, Any]:
    numbers = dict.fromkeys(("step", "wall_seconds", "agent_updates", "dropped_steps"), 5000)
    return {"task": task, "system": system, "seed": seed, "curve": [[2500, -1000.0], [5000, score]], **numbers}


def test_a_run_replaces_that_of_the_same_task_mode_and_seed_alone(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "sample_efficiency.json"
    first = [
        record("Hopper-v5", "freerun", 0, 1.0),
        record("Pendulum-v1", "freerun", 0, 2.0),
        record("Pendulum-v1", "freerun", 1, 3.0),
    ]
    for one in first:
        bench.add(path, one)
    bench.add(path, record("Pendulum-v1", "freerun", 0, 9.0))
    scores = {bench.key(one): one["curve"][-1][1] for one in json.loads(path.read_text())["content"]}
    assert scores == {
        ("Hopper-v5", "freerun", 0): 1.0,
        ("Pendulum-v1", "freerun", 0): 9.0,
        ("Pendulum-v1", "freerun", 1): 3.0,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["sample_efficiency.json"]


def test_a_report_shows_what_this_call_did_not_run(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that the call asks for is there already, so it runs nothing; Hopper it does not ask for."""
    for one in (record("Hopper-v5", "freerun", 0, 1.0), record("Pendulum-v1", "batch", 0, -150.0)):
        bench.add(tmp_path / "sample_efficiency.json", one)
    before = (tmp_path / "sample_efficiency.json").read_bytes()
    asked = ["--tasks", "Pendulum-v1", "--systems", "batch", "--seeds", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sample_efficiency.py", *asked])
    bench.main()
    report = (tmp_path / "sample_efficiency.md").read_text()
    assert "## Hopper-v5" in report
    assert "| batch | 1 | -150 (-150 – -150) | -150 | 1 of 1 |" in report
    assert (tmp_path / "sample_efficiency.json").read_bytes() == before
    assert report in capsys.readouterr().out
