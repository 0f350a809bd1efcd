"""The original's commands: thin scripts that say the same in freerun's words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEW = ["--total-episodes", "8", "--episodes-per-update", "4", "--red-agent", "RedMeanderAgent", "--episode-steps", "5"]
SCRIPTS = {
    "workflow_rl/parallel_train_workflow_rl.py": "--n-envs",
    "workflow_rl/async_train_workflow_rl.py": "--n-workers",
    "workflow_rl/executor_async_train_workflow_rl.py": "--n_workers",
    "scripts/run_async_training.sh": "--n-workers",
    "scripts/run_executor_async_training.sh": "--n-workers",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_and_says_so_in_the_familiar_words(script: str, tmp_path: Path) -> None:
    command = [str(ROOT / script)] if script.endswith(".sh") else [sys.executable, str(ROOT / script)]
    run = subprocess.run(
        [*command, *FEW, SCRIPTS[script], "2", "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "Collecting 4 episodes asynchronously..." in run.stdout
    assert "Collected 4 episodes in" in run.stdout
    assert run.stdout.count("Update complete") == 2
    config = (tmp_path / "run" / "config.json").read_text()
    assert '"num_workers": 2' in config
    assert '"red_agent": "RedMeanderAgent"' in config
