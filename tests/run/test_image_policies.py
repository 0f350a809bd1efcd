"""Trained policies that see images: loaded, exported, and continued by another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_envs import FallingBall

import freerun
from freerun.core import UserError
from freerun.run.export import export

QUICK: dict[str, Any] = {"total_episodes": 6, "episodes_per_update": 3, "quiet": True, "mode": "sequential"}
ENV = "image_envs:FallingBall"


def test_a_numpy_export_takes_pictures_as_the_environment_has_them(tmp_path: Path) -> None:
    freerun.train(ENV, env_args={"kind": "sensor"}, run_dir=tmp_path / "run", **QUICK)
    made = export(tmp_path / "run", "numpy", trust=[ENV], observations=10)
    policy = freerun.load_policy(made.path)
    obs, _ = FallingBall("sensor").reset(seed=1)
    assert policy.predict(obs) in (0, 1, 2)
    assert policy.predict([obs, obs]).shape == (2,)


def test_a_run_starts_from_another_with_the_same_network_only(tmp_path: Path) -> None:
    freerun.train(ENV, run_dir=tmp_path / "first", **QUICK)
    freerun.train(ENV, run_dir=tmp_path / "next", init_from=tmp_path / "first", **QUICK)
    with pytest.raises(UserError, match="has another network: give --network small-cnn as that run did"):
        freerun.train(ENV, run_dir=tmp_path / "other", network="impala", init_from=tmp_path / "first", **QUICK)
