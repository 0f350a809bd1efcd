"""Environments with the interface of the old gym: one sentence in every mode, which names the check."""

from __future__ import annotations

import subprocess
from pathlib import Path

import preloaded_python
import pytest

from freerun.settings import registry


def train(env: str, run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "freerun", "train", env, "-q", "--total-steps", "100", "--run-dir", str(run_dir)]
    return preloaded_python.run(*command, *words, cwd=Path(__file__).parent)


TWO_COLLECTORS = ("--num-collectors", "2", "--num-envs", "2")
WORKERS = {
    "sequential": (),
    "continuous": TWO_COLLECTORS,
    "continuous --collector-kind thread": TWO_COLLECTORS,
    "continuous --collector-kind process": TWO_COLLECTORS,
    "batch": ("--num-envs", "2"),
}
"""How the modes are given two workers or environments, where --num-workers is not the way."""


@pytest.mark.own_ray
@pytest.mark.parametrize("mode", dict.fromkeys([*registry.MODES, *WORKERS]))
def test_a_step_of_four_values_gives_one_sentence(mode: str, run_dir: Path) -> None:
    workers = WORKERS.get(mode, ("--num-workers", "2"))
    done = train("mistaken_envs:FourValues", run_dir, "--mode", *mode.split(), *workers)
    # On a very busy machine, continuous may also tell that its trial in threads took too long.
    (line,) = [line for line in done.stderr.splitlines() if "tried out in threads" not in line]
    assert line.startswith(
        "freerun: the environment's step returned 4 values, but must return five values: obs, reward,"
    )
    assert "`freerun check-env`" in line
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("env", "words", "message"),
    [
        ("FourValues", ("--max-episode-steps", "9"), "the environment's step returned another number of values"),
        ("behind_a_wrapper", (), "the environment's step returned another number of values"),
        ("BareReset", (), "the environment's reset returned ndarray, but must return two values: obs, info"),
    ],
)
def test_a_wrapper_or_a_reset_that_stumbles_gives_one_sentence(
    env: str, words: tuple[str, ...], message: str, run_dir: Path
) -> None:
    done = train(f"mistaken_envs:{env}", run_dir, "--num-workers", "2", *words)
    (line,) = done.stderr.splitlines()
    assert message in line
    assert "`freerun check-env`" in line
    assert done.returncode == 2
