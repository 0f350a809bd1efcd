"""Action masks in every mode. The environment raises at an action that its mask does not allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.core import UserError
from freerun.run.replay_run import replay
from freerun.settings import registry

WHOLE = [name for name, mode in registry.MODES.items() if mode.traits.whole_episodes]
LAGGING = [name for name, mode in registry.MODES.items() if not mode.traits.takes_turns]
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
OF_MODE: dict[str, dict[str, Any]] = {
    "continuous": {"num_collectors": 2, "num_envs": 4, "collection_batch_size": 32},
    "batch": {"num_envs": 4, "num_steps_per_env": 16},
    "freerun": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
    "ray": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> freerun.Result:
    return freerun.train(**SETTINGS, mode="sequential", run_dir=tmp_path_factory.mktemp("masked") / "run")


@pytest.mark.parametrize("mode", [mode for mode in WHOLE if mode != "sequential"])
def test_every_mode_ends_at_the_weights_of_sequential_also_when_resumed(
    mode: str, reference: freerun.Result, run_dir: Path
) -> None:
    freerun.train(**{**SETTINGS, "total_episodes": 16}, mode=mode, num_workers=2, run_dir=run_dir)
    result = freerun.resume(run_dir, total_episodes=48)
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)
    assert result.summary["mean_return"] == reference.summary["mean_return"]


DQN: dict[str, Any] = {"env": "toy_envs:Masked", "algo": "dqn", "hidden_sizes": (16,), "seed": 5, "quiet": True}
DQN |= {"steps_per_update": 50, "learning_starts": 100, "batch_size": 16, "epsilon_steps": 200}


@pytest.fixture(scope="module")
def dqn_reference(tmp_path_factory: pytest.TempPathFactory) -> freerun.Result:
    folder = tmp_path_factory.mktemp("masked_dqn") / "run"
    freerun.train(**DQN, deterministic=True, total_steps=200, mode="sequential", run_dir=folder)
    return freerun.resume(folder, total_steps=400)


@pytest.mark.parametrize("mode", [mode for mode in WHOLE if mode != "sequential"])
def test_every_mode_of_dqn_ends_at_the_weights_of_sequential_also_when_resumed(
    mode: str, dqn_reference: freerun.Result, run_dir: Path
) -> None:
    freerun.train(**DQN, deterministic=True, total_steps=200, mode=mode, num_workers=2, run_dir=run_dir)
    result = freerun.resume(run_dir, total_steps=400)
    np.testing.assert_array_equal(result.policy.weights, dqn_reference.policy.weights)


@pytest.mark.parametrize("mode", LAGGING)
def test_segments_of_dqn_keep_to_the_masks(mode: str, run_dir: Path) -> None:
    own = OF_MODE.get(mode, {"num_workers": 2})
    result = freerun.train(**DQN, env_args={"kind": "many"}, mode=mode, total_steps=512, run_dir=run_dir, **own)
    assert result.summary["env_steps"] >= 512
    assert not (run_dir / "incidents.jsonl").exists()


@pytest.mark.parametrize("source", [{"masks": "observation"}, {"masks": "method"}], ids=["observation", "method"])
def test_where_the_masks_come_from_does_not_matter(
    source: dict[str, Any], reference: freerun.Result, run_dir: Path
) -> None:
    env = "toy_envs:MaskedByMethod" if source["masks"] == "method" else "toy_envs:Masked"
    env_args = {} if source["masks"] == "method" else source
    result = freerun.train(**{**SETTINGS, "env": env}, env_args=env_args, mode="sequential", run_dir=run_dir)
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)


@pytest.mark.parametrize("kind", ["multidiscrete", "many"])
@pytest.mark.parametrize("mode", LAGGING)
def test_segments_and_lag_keep_to_the_masks(mode: str, kind: str, run_dir: Path) -> None:
    settings = {"steps_per_update": 64, "num_epochs": 2, "hidden_sizes": (8,), "quiet": True}
    own = OF_MODE.get(mode, {"num_workers": 2})
    env_args = {"kind": kind}
    result = freerun.train(
        "toy_envs:Masked", env_args=env_args, mode=mode, total_steps=512, run_dir=run_dir, **settings, **own
    )
    assert result.summary["env_steps"] >= 512
    assert "incidents.jsonl" not in {path.name for path in run_dir.iterdir()}


def test_a_run_with_lag_is_replayed_bit_for_bit(run_dir: Path) -> None:
    settings = {**SETTINGS, "deterministic": False, "checkpoint_every": "1", "max_lag": 2, "num_workers": 2}
    result = freerun.train(**settings, mode="freerun", run_dir=run_dir)
    assert result.summary["lag_max"] >= 1
    again = replay(run_dir)
    assert again.is_same
    np.testing.assert_array_equal(again.weights, result.policy.weights)


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
