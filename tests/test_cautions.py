"""What a run warns of when it starts, although it can start."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import preloaded_python
import pytest
from mistaken_envs import Pixels
from toy_envs import OneBit
from toy_networks import cnn

import freerun

BRIEF: dict[str, Any] = {"total_steps": 20, "mode": "sequential", "quiet": True}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_pixels_in_an_mlp_are_told_in_one_line_of_log_and_terminal(run_dir: Path) -> None:
    words = ["train", "mistaken_envs:Pixels", "--network", "mlp", "--total-steps", "20", "--mode", "sequential"]
    done = preloaded_python.run("-m", "freerun", *words, "--run-dir", str(run_dir), cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stderr.splitlines() if "uint8 images of shape (3, 8, 8)" in line]
    (logged,) = [line for line in (run_dir / "log.txt").read_text().splitlines() if "uint8 images" in line]
    assert len(shown) == 1
    for line in (shown[0], logged):
        assert "192 pixels flattened into one row and unscaled (0 to 255)" in line
        assert "leave --network mlp out, and they get a CNN (docs/images.md)" in line


@pytest.mark.parametrize("normalize_obs", [None, True])
def test_pixels_stay_unscaled_also_where_observations_are_normalised(
    normalize_obs: bool | None, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    freerun.train(Pixels, run_dir=run_dir, network="mlp", normalize_obs=normalize_obs, **BRIEF)
    (warning,) = warnings_of(caplog)
    assert "flattened into one row and unscaled (0 to 255)" in warning


def test_an_algorithm_without_networks_for_images_names_the_one_that_has(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    freerun.train(Pixels, run_dir=run_dir, algo="sac", env_args={"is_continuous": True}, **BRIEF)
    (warning,) = warnings_of(caplog)
    assert "choose --algo ppo, and they get a CNN" in warning


def test_stacks_of_colour_pictures_need_a_network_of_ones_own(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    freerun.train(Pixels, run_dir=run_dir, env_args={"num_frames": 2}, **BRIEF)
    (warning,) = warnings_of(caplog)
    assert "give a network of your own, such as a CNN, with --network (docs/own_networks.md)" in warning


@pytest.mark.parametrize("network", [None, cnn])
def test_nothing_is_told_where_a_network_reads_the_pixels(
    network: Any, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    freerun.train(Pixels, run_dir=run_dir, network=network, **BRIEF)
    assert warnings_of(caplog) == []


SCRIPT = """
from toy_envs import OneBit

import freerun


class Room(OneBit):
    pass


if __name__ == "__main__":
    result = freerun.train(
        Room, mode="pipes", num_workers=2, total_episodes=8, episodes_per_update=4, run_dir="run", quiet=True
    )
    print(freerun.load_policy("run").weights.shape)
    print(freerun.evaluate("run", episodes=2))
    print(freerun.resume("run", total_episodes=12).summary["episodes"])
"""


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return preloaded_python.run(*words, cwd=folder, env={**os.environ, "PYTHONPATH": path})


def test_an_environment_of_the_script_is_told_at_the_start_and_can_be_used_within_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "__main__:Room can be used in this program only" in line]
    assert len(warnings) == 2, "one when it starts, and one when it goes on"
    assert f"({tmp_path / 'script.py'})" in warnings[0]
    assert "define it at the top level of a module" in warnings[0]
    assert "__main__:Room" in (tmp_path / "run" / "log.txt").read_text()
    *_, evaluation, episodes = done.stdout.splitlines()
    assert "over 2 episodes" in evaluation
    assert int(episodes) == 12

    evaluated = run_python(tmp_path, "-m", "freerun", "eval", "run")
    assert evaluated.returncode == 2
    (line,) = evaluated.stderr.splitlines()
    assert "environment 'Room' was defined in the script that trained the run" in line
    assert '"my_module:Room" into the run\'s config.json' in line
    assert "--trust my_module:Room" in line

    # What the sentence advises.
    (tmp_path / "my_module.py").write_text("from toy_envs import OneBit as Room\n")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"__main__:Room"', '"my_module:Room"'))
    evaluated = run_python(tmp_path, "-m", "freerun", "eval", "run", "--episodes", "2", "--trust", "my_module:Room")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "over 2 episodes" in evaluated.stdout


def test_what_has_no_name_of_its_own_is_told(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    freerun.train(functools.partial(OneBit, kind="discrete"), run_dir=run_dir, **BRIEF)
    (warning,) = warnings_of(caplog)
    assert "the environment functools:partial can be used in this program only" in warning


def test_nothing_is_told_of_what_can_be_imported(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    freerun.train(OneBit, run_dir=run_dir, **BRIEF)
    assert warnings_of(caplog) == []
