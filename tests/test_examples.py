"""Every file in examples/ is run as its first lines say, and learns something."""

from __future__ import annotations

import os
from pathlib import Path

import preloaded_python
import pytest

import freerun

EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCE = Path(freerun.__file__).parent.parent
WITHOUT_LEARNING = {"own_env": -40.0, "own_network": -0.3, "own_algorithm": 60.0, "own_mode": 50.0}
"""A return that a policy which has learned nothing does not reach."""


def run(words: list[str], folder: Path, path: Path = SOURCE) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(SOURCE)))}
    done = preloaded_python.run(*words, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_it_runs_as_a_script_and_learns(name: str, tmp_path: Path) -> None:
    output = run([str(EXAMPLES / f"{name}.py")], tmp_path)
    mean_return = float(output.rpartition("mean return ")[2])
    assert mean_return > WITHOUT_LEARNING[name]


def test_all_of_them_together_from_the_command_line(tmp_path: Path) -> None:
    command = ["-m", "freerun", "train", "own_network:Catch", "--network", "own_network:cnn"]
    command += ["--mode", "own_mode:InThisProcess", "--num-workers", "4", "--total-steps", "2000", "-q"]
    assert "Finished: " in run(command, tmp_path, EXAMPLES)
    command = ["-m", "freerun", "train", "own_env:Room", "--algo", "own_algorithm:Reinforce"]
    command += ["--mode", "pipes", "--num-workers", "2", "--total-episodes", "40", "--gamma", "0.9", "-q"]
    assert "Finished: " in run(command, tmp_path, EXAMPLES)
