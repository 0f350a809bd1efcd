"""Run folders that version 0.1.0 wrote before it was rebuilt (commit be31680): they can still be resumed and used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import freerun

OLD_RUNS = Path(__file__).parents[1] / "old_runs"
LONGER = {"ppo": 2_600, "sac": 800}


@pytest.fixture(params=sorted(LONGER))
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(OLD_RUNS / request.param, tmp_path / request.param)
    return tmp_path / str(request.param)


def test_a_run_of_the_old_version_is_resumed(old_run: Path) -> None:
    total_steps = LONGER[old_run.name]
    before = freerun.load_policy(old_run).weights.copy()
    result = freerun.resume(old_run, total_steps=total_steps, quiet=True)
    assert result.run_dir == old_run
    assert result.summary["outcome"] == "finished"
    assert result.summary["env_steps"] >= total_steps
    assert not np.array_equal(result.policy.weights, before)


def test_the_settings_of_an_old_run_start_a_new_one(old_run: Path, run_dir: Path) -> None:
    settings = json.loads((old_run / "config.json").read_text())
    result = freerun.train(**{**settings, "total_steps": 300, "run_dir": run_dir})
    assert result.summary["env_steps"] >= 300
