"""The short form of `make chaos`: a few storms in one mode, and no assertion on how long anything takes.

`test_killed_in_a_step.py` kills workers of every mode, and `make chaos` has storms of every kind for each.
"""

from __future__ import annotations

from pathlib import Path

import chaos
import pytest

SEED = 2
"""The first storm is then ten kills of workers in the middle of a step, the others are of any kind."""


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_workers_are_killed_and_stopped_and_nothing_is_lost(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "BASELINE_SECONDS", 3.0)
    monkeypatch.setattr(chaos, "SECONDS_PER_FAULT", 1.2)  # ten of them come in the first storm
    monkeypatch.setattr(chaos, "RECOVERED_SHARE", 0.1)
    monkeypatch.setattr(chaos, "RECOVERY_SECONDS", 60.0)
    report = chaos.torment("freerun", 12, SEED, run_dir, print)
    assert report.num_faults >= 10, "it was over too soon"
    assert "kill in steps" in [storm.name for storm in report.storms]
    assert not report.complaints
    assert report.summary["worker_restarts"] >= 1
