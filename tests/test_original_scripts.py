"""The original's commands: thin scripts that say the same in freerun's words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded_python
import pytest
from leftovers import OutsideRun

from freerun.adapters.isaac_launch import is_installed

ROOT = Path(__file__).parents[1]
FEW = ["--total-episodes", "8", "--episodes-per-update", "4", "--red-agent", "RedMeanderAgent", "--episode-steps", "5"]
sys.path.insert(0, str(ROOT / "workflow_rl"))
SCRIPTS = {
    "workflow_rl/parallel_train_workflow_rl.py": "--n-envs",
    "workflow_rl/async_train_workflow_rl.py": "--n-workers",
    "workflow_rl/executor_async_train_workflow_rl.py": "--n_workers",
    "workflow_rl/ray_async_train_workflow_rl.py": "--n-workers",
    "scripts/run_async_training.sh": "--n-workers",
    "scripts/run_executor_async_training.sh": "--n-workers",
}


def finished(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    if script.endswith(".py"):
        run = preloaded_python.run(str(ROOT / script), *words)
    else:
        environment = {**os.environ, "PYTHON": sys.executable}
        command = [str(ROOT / script), *words]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_and_says_so_in_the_familiar_words(script: str, tmp_path: Path) -> None:
    run = finished(script, *FEW, SCRIPTS[script], "2", "--run-dir", str(tmp_path / "run"))
    is_synchronous = "parallel" in script
    assert f"Collecting 4 episodes{'' if is_synchronous else ' asynchronously'}..." in run.stdout.splitlines()
    assert ("asynchronously" in run.stdout) != is_synchronous
    assert "Collected 4 episodes in" in run.stdout
    assert run.stdout.count("Update complete") == 2
    config = (tmp_path / "run" / "config.json").read_text()
    assert '"num_workers": 2' in config
    assert '"red_agent": "RedMeanderAgent"' in config


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_flags_it_has_the_defaults_of_the_original(run_dir: Path) -> None:
    """A run writes its settings once all of its workers have started; then it is told to end."""
    script = [str(ROOT / "workflow_rl" / "executor_async_train_workflow_rl.py")]
    with OutsideRun([], run_dir, script) as run:
        deadline = time.monotonic() + 200
        while not (run_dir / "config.json").exists():
            assert run.process.poll() is None, run.text
            assert time.monotonic() < deadline, run.text
            time.sleep(0.1)
        run.process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a run in the background ignores
        assert run.process.wait(60) == 130, run.text
    config = json.loads((run_dir / "config.json").read_text())
    names = ("mode", "num_workers", "total_episodes", "total_steps", "episodes_per_update", "red_agent")
    assert [config[name] for name in names] == ["executor", 100, 100_000, None, 100, "B_lineAgent"]


NETWORK = ["train", "freerun/NetworkDefence-v0", "--mode", "ray", "--display", "classic"]
CYBORG = ["train", "cyborg/CAGE2-v0", *NETWORK[2:]]
WORKERS, EPISODES = ["--num-workers", "100"], ["--total-episodes", "100000"]
OTHERS = ["--episodes-per-update", "100", "--red-agent", "B_lineAgent"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [*NETWORK, *WORKERS, *EPISODES, *OTHERS]),
        (["--n_workers=8", "--total_steps", "500"], [*NETWORK, *OTHERS, "--num-workers=8", "--total-steps", "500"]),
        (["--cyborg_path=X", "--n-envs", "8"], [*CYBORG, *EPISODES, *OTHERS, "--cyborg-path=X", "--num-workers", "8"]),
        (["--resume", "runs/mine"], ["train", "--display", "classic", "--resume", "runs/mine"]),
    ],
)
def test_what_is_given_takes_the_place_of_a_default(words: list[str], expected: list[str]) -> None:
    from original_flags import command, translate

    assert command("ray", translate(words)) == expected


SMALL_MBPO = ["--preset", "mbpo-small", "--total-steps", "256", "--learning-starts", "64", "--updates-per-step", "0.05"]
ISAAC_SCRIPTS = {
    "scripts/run_async_mbpo.sh": "continuous",
    "scripts/run_async_mbpo_v2.sh": "batch",
}
FLAGS = {
    "continuous": ["--num_collectors", "2", "--collection_batch_size", "32", "--num_steps_per_env=24"],
    "batch": ["--num_steps_per_env", "4", "--num_collectors", "2", "--collection_batch_size=32"],
}


@pytest.mark.slow
@pytest.mark.skipif(is_installed(), reason="Isaac Lab is installed")
@pytest.mark.parametrize("script", ISAAC_SCRIPTS)
def test_mbpo_on_the_drone_with_all_the_flags_of_the_original(script: str, tmp_path: Path) -> None:
    mode = ISAAC_SCRIPTS[script]
    words = ["--task", "Isaac-Exploration-Rough-Drone-v0", "--num_envs", "8", "--max_queue_size", "4", "--headless"]
    words += ["--device", "cpu", *FLAGS[mode], *SMALL_MBPO, "--run_dir", str(tmp_path / "run")]
    run = finished(script, *words)
    assert "simulated by freerun/RoughDrone-v0" in run.stderr
    ignored = {"continuous": ["--num_steps_per_env"], "batch": ["--num_collectors", "--collection_batch_size"]}[mode]
    assert [line.partition(" ")[0] for line in run.stderr.splitlines() if " is ignored: " in line] == ignored
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["mode"], config["algo"], config["num_envs"], config["max_queue_size"]) == (mode, "mbpo", 8, 4)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] >= 256
