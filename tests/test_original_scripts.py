"""The original's commands: thin scripts that say the same in freerun's words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from freerun.envs.isaac_launch import is_installed

ROOT = Path(__file__).parents[1]
FEW = ["--total-episodes", "8", "--episodes-per-update", "4", "--red-agent", "RedMeanderAgent", "--episode-steps", "5"]
SCRIPTS = {
    "workflow_rl/parallel_train_workflow_rl.py": "--n-envs",
    "workflow_rl/async_train_workflow_rl.py": "--n-workers",
    "workflow_rl/executor_async_train_workflow_rl.py": "--n_workers",
    "scripts/run_async_training.sh": "--n-workers",
    "scripts/run_executor_async_training.sh": "--n-workers",
}


def finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_and_says_so_in_the_familiar_words(script: str, tmp_path: Path) -> None:
    command = [str(ROOT / script)] if script.endswith(".sh") else [sys.executable, str(ROOT / script)]
    run = finished([*command, *FEW, SCRIPTS[script], "2", "--run-dir", str(tmp_path / "run")])
    assert "Collecting 4 episodes asynchronously..." in run.stdout
    assert "Collected 4 episodes in" in run.stdout
    assert run.stdout.count("Update complete") == 2
    config = (tmp_path / "run" / "config.json").read_text()
    assert '"num_workers": 2' in config
    assert '"red_agent": "RedMeanderAgent"' in config


SMALL_MBPO = ["--preset", "mbpo-small", "--total-steps", "256", "--learning-starts", "64", "--updates-per-step", "0.05"]
ISAAC_SCRIPTS = {
    "scripts/run_async_mbpo.sh": "continuous",
    "scripts/run_async_mbpo_v2.sh": "batch",
}
FLAGS = {
    "continuous": ["--num_collectors", "2", "--collection_batch_size", "32", "--num_steps_per_env=24"],
    "batch": ["--num_steps_per_env", "4", "--num_collectors", "2", "--collection_batch_size=32"],
}


@pytest.mark.skipif(is_installed(), reason="Isaac Lab is installed")
@pytest.mark.parametrize("script", ISAAC_SCRIPTS)
def test_mbpo_on_the_drone_with_all_the_flags_of_the_original(script: str, tmp_path: Path) -> None:
    mode = ISAAC_SCRIPTS[script]
    words = ["--task", "Isaac-Exploration-Rough-Drone-v0", "--num_envs", "8", "--max_queue_size", "4", "--headless"]
    words += ["--device", "cpu", *FLAGS[mode], *SMALL_MBPO, "--run_dir", str(tmp_path / "run")]
    run = finished([str(ROOT / script), *words])
    assert "simulated by freerun/RoughDrone-v0" in run.stderr
    ignored = {"continuous": ["--num_steps_per_env"], "batch": ["--num_collectors", "--collection_batch_size"]}[mode]
    assert [line.partition(" ")[0] for line in run.stderr.splitlines() if " is ignored: " in line] == ignored
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["mode"], config["algo"], config["num_envs"], config["max_queue_size"]) == (mode, "mbpo", 8, 4)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] >= 256
