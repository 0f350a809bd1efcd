"""Action masks: where they come from, what is wrong with some, and what they help to learn.

`test_policy_kinds.py` takes them through every mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.core import UserError

SETTINGS: dict[str, Any] = {
    "env": "toy_envs:Masked",
    "total_episodes": 48,
    "episodes_per_update": 16,
    "minibatch_size": 64,
    "num_epochs": 2,
    "hidden_sizes": (16,),
    "entropy_coef": 0.01,
    "normalize_obs": True,
    "deterministic": True,
    "seed": 5,
    "quiet": True,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> freerun.Result:
    return freerun.train(**SETTINGS, mode="sequential", run_dir=tmp_path_factory.mktemp("masked") / "run")


@pytest.mark.parametrize("source", [{"masks": "observation"}, {"masks": "method"}], ids=["observation", "method"])
def test_where_the_masks_come_from_does_not_matter(
    source: dict[str, Any], reference: freerun.Result, run_dir: Path
) -> None:
    env = "toy_envs:MaskedByMethod" if source["masks"] == "method" else "toy_envs:Masked"
    env_args = {} if source["masks"] == "method" else source
    result = freerun.train(**{**SETTINGS, "env": env}, env_args=env_args, mode="sequential", run_dir=run_dir)
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)


@pytest.mark.parametrize("mode", ["sequential", "freerun"])
def test_a_mask_that_forbids_everything_is_an_error_with_the_seed_of_its_episode(mode: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=r"forbids every action after 3 steps of the episode with seed \d+"):
        freerun.train(**SETTINGS, env_args={"all_false_at": 3}, mode=mode, run_dir=run_dir)


def test_a_policy_learns_the_best_of_what_is_allowed(run_dir: Path) -> None:
    """A random allowed choice is worth 1 on average, and the best of those that are allowed 1.33."""
    settings: dict[str, Any] = {"total_steps": 15_000, "steps_per_update": 500, "learning_rate": 3e-3, "gamma": 0.0}
    result = freerun.train("toy_envs:Masked", mode="sequential", quiet=True, seed=1, run_dir=run_dir, **settings)
    evaluation = freerun.evaluate(result.policy, episodes=100)
    assert sum(evaluation.returns) / sum(evaluation.lengths) > 1.25
