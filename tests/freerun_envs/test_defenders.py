"""Defenders that learn nothing, and the comparison with one that has learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import UserError
from freerun.run import evaluation
from freerun.tools.cli.main import main
from freerun_envs import defenders


def test_restore_on_sight_takes_the_first_suspect() -> None:
    obs = np.zeros((3, 77), np.float32)
    obs[1, 4 * 5 + 2] = obs[1, 4 * 9 + 3] = 1  # hosts 5 and 9
    obs[2, 4 * 5] = 1  # a scan is no compromise
    obs[:, 60] = 1  # a workflow's numbers are none of its business
    assert defenders.restore_on_sight(obs, np.full(3, 7)).tolist() == [0, 132 + 5, 0]


def test_they_meet_the_same_episodes_every_time() -> None:
    env = GymnasiumFactory("freerun/NetworkDefence-v0", {"episode_steps": 30}).make_one()
    for defender in defenders.DEFENDERS.values():
        first, second = (defenders.play(env, defender, 5, 3) for _ in range(2))
        assert first == second
    assert len(set(defenders.play(env, defenders.uniformly_random, 5, 3))) > 1


def test_a_trained_defender_is_compared_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"episode_steps": 10, "total_episodes": 4, "episodes_per_update": 2, "num_workers": 1, "quiet": True}
    freerun.train("freerun/NetworkDefence-v0", **settings, run_dir=tmp_path / "run")
    assert main(["eval", str(tmp_path / "run"), "--episodes", "2", "--compare"]) == 0
    shown = capsys.readouterr().out
    for name in ("trained", "sleep", "random", "restore on sight"):
        assert name in shown


def test_other_environments_have_no_defenders(tmp_path: Path) -> None:
    freerun.train("CartPole-v1", total_steps=50, quiet=True, run_dir=tmp_path / "run")
    with pytest.raises(UserError, match="baseline policies: freerun/NetworkDefence-v0 or cyborg/CAGE2"):
        evaluation.compare(tmp_path / "run")
