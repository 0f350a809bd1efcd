"""Images: stacks of frames in segments, no torch in workers, and what a CNN learns.

`test_policy_kinds.py` takes them through every mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun

SETTINGS: dict[str, Any] = {
    "env": "image_envs:FallingBall",
    "total_episodes": 18,
    "episodes_per_update": 6,
    "minibatch_size": 32,
    "num_epochs": 2,
    "deterministic": True,
    "seed": 5,
    "quiet": True,
}


@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_stacks_of_frames_fit_into_segments(envs_per_worker: int, run_dir: Path) -> None:
    settings: dict[str, Any] = {"steps_per_update": 64, "num_epochs": 1, "quiet": True, "total_steps": 256}
    result = freerun.train(
        "image_envs:stacked_balls", envs_per_worker=envs_per_worker, segment_steps=16, run_dir=run_dir, **settings
    )
    assert result.summary["env_steps"] >= 256


def test_workers_with_a_cnn_do_without_torch(run_dir: Path) -> None:
    freerun.train(**SETTINGS, env_args={"fails_with_torch": True}, mode="freerun", num_workers=1, run_dir=run_dir)
    assert "incidents.jsonl" not in {path.name for path in run_dir.iterdir()}


@pytest.mark.parametrize("kind", ["pixels", "sensor"])
def test_a_cnn_learns_to_catch(kind: str, run_dir: Path) -> None:
    """A paddle that stands still catches a quarter of all balls: a return of -0.5. How much more is learned differs
    with the last bits of the processor's matrix products."""
    settings: dict[str, Any] = {"steps_per_update": 512, "minibatch_size": 128, "num_epochs": 4, "learning_rate": 2e-3}
    result = freerun.train(
        "image_envs:FallingBall",
        env_args={"kind": kind},
        mode="sequential",
        total_steps=16_000,
        quiet=True,
        run_dir=run_dir,
        **settings,
    )
    assert np.mean(freerun.evaluate(result.policy, episodes=50).returns) > 0.0
