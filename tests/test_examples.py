"""Every file in examples/ is run as its first lines say, and learns something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded_python
import pytest

import freerun

EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCE = Path(freerun.__file__).parent.parent
WITHOUT_LEARNING = {
    "own_env": -40.0,
    "own_network": -0.3,
    "own_algorithm": 60.0,
    "own_mode": 50.0,
    "early_stopping": 100.0,
    "curriculum": 0.5,
    "optuna_pruning": 30.0,
}
"""A return that a policy which has learned nothing does not reach."""
NODE = "policy_node"
"""It acts and does not train."""
NEEDS = {"optuna_pruning": "optuna"}
"""What an example needs that freerun does not."""


def run(words: list[str], folder: Path, path: Path = SOURCE) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(SOURCE)))}
    done = preloaded_python.run(*words, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {NODE}))
def test_it_runs_as_a_script_and_learns(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    output = run([str(EXAMPLES / f"{name}.py")], tmp_path)
    mean_return = float(output.rpartition("mean return ")[2])
    assert mean_return > WITHOUT_LEARNING[name]


@pytest.mark.slow
def test_all_of_them_together_from_the_command_line(tmp_path: Path) -> None:
    command = ["-m", "freerun", "train", "own_network:Catch", "--network", "own_network:cnn"]
    command += ["--mode", "own_mode:InThisProcess", "--num-workers", "4", "--total-steps", "2000", "-q"]
    assert "Finished: " in run(command, tmp_path, EXAMPLES)
    command = ["-m", "freerun", "train", "own_env:Room", "--algo", "own_algorithm:Reinforce"]
    command += ["--mode", "pipes", "--num-workers", "2", "--total-episodes", "40", "--gamma", "0.9", "-q"]
    assert "Finished: " in run(command, tmp_path, EXAMPLES)


def test_the_node_answers_every_observation_with_an_action(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mode": "sequential", "quiet": True, "hidden_sizes": (8,)}
    result = freerun.train("CartPole-v1", run_dir=tmp_path / "run", total_steps=100, steps_per_update=100, **settings)
    exported = freerun.export(result.run_dir, "numpy", observations=10)
    observations = [[0.0, 0.1, 0.2, 0.3], [0.3, -0.2, 0.1, 0.0]]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{NODE}.py"), str(exported.path)],
        input="".join(f"{json.dumps(obs)}\n" for obs in observations),
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        result.policy.predict(obs) for obs in observations
    ]
    assert done.stderr == "actions per second: 50\n"
