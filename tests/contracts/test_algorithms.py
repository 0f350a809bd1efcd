"""What every algorithm must do in every mode; a new line in either registry is tested here by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.run import evaluation
from freerun.settings import registry

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"steps_per_update": 200, "hidden_sizes": (8,), "num_epochs": 2},
    "sac": {"steps_per_update": 100, "hidden_sizes": (8,), "learning_starts": 200, "batch_size": 16},
    "fastsac": {"steps_per_update": 100, "hidden_sizes": (8,), "learning_starts": 200, "batch_size": 16},
    "dqn": {
        "steps_per_update": 100,
        "hidden_sizes": (8,),
        "learning_starts": 200,
        "updates_per_step": 1.0,
        "batch_size": 16,
    },
    "mbpo": {
        "steps_per_update": 100,
        "hidden_sizes": (8,),
        "model_hidden_sizes": (8,),
        "num_models": 2,
        "num_elites": 1,
        "learning_starts": 200,
        "updates_per_step": 1.0,
        "rollouts_per_step": 5.0,
        "model_updates_per_step": 0.5,
        "batch_size": 16,
    },
}
FEW_ENVS: dict[str, dict[str, Any]] = {
    "continuous": {"num_collectors": 2, "num_envs": 2, "collection_batch_size": 50, "collector_kind": "process"},
    "batch": {"num_envs": 2, "num_steps_per_env": 50},
    "freerun": {"num_workers": 2, "segment_steps": 50},
    "sequential": {},
}
STATEFUL = ("sac", "fastsac", "dqn", "mbpo")


def env_for(algo: str) -> str:
    """An environment whose actions the algorithm can learn, with episodes of 200 steps."""
    return "Pendulum-v1" if issubclass(spaces.Box, registry.ALGORITHMS[algo].traits.action_spaces) else "MountainCar-v0"


def options(algo: str, mode: str, **more: Any) -> dict[str, Any]:
    common = {"total_steps": 400, "quiet": True, "seed": 4, **SMALL[algo]}
    return {**common, "algo": algo, "mode": mode, **FEW_ENVS.get(mode, {"num_workers": 2}), **more}


@pytest.mark.parametrize("mode", registry.MODES)
@pytest.mark.parametrize("algo", registry.ALGORITHMS)
def test_it_trains_in_the_mode_and_the_books_balance(algo: str, mode: str, tmp_path: Path) -> None:
    result = freerun.train(env_for(algo), **options(algo, mode), run_dir=tmp_path / "run")
    summary = result.summary
    assert summary["outcome"] == "finished"
    assert summary["env_steps"] >= 400
    assert summary["updates"] >= 1
    assert np.isfinite(result.policy.weights).all()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    if algo in STATEFUL:
        assert 0 < last["agent_updates"] <= summary["env_steps"]  # one per step, but not for the first ones
        assert last["real_data"] == summary["env_steps"]
    assert len(evaluation.evaluate(tmp_path / "run", 1).returns) == 1


@pytest.mark.parametrize("algo", STATEFUL)
def test_gradient_steps_follow_the_real_steps_exactly(algo: str, tmp_path: Path) -> None:
    counts = []
    for mode in ("sequential", "batch"):
        freerun.train(env_for(algo), **options(algo, mode), run_dir=tmp_path / mode)
        last = json.loads((tmp_path / mode / "metrics.jsonl").read_text().splitlines()[-1])
        counts.append((last["step"], last["agent_updates"]))
    assert counts == [(400, 300)] * 2  # of the first 200 steps, one update's 100 count


@pytest.mark.parametrize("algo", registry.ALGORITHMS)
def test_what_it_has_learned_can_be_saved_and_restored(algo: str) -> None:
    factory = GymnasiumFactory(env_for(algo))
    made = []
    for seed in (0, 1):
        config = registry.make_config({"env": env_for(algo), **options(algo, "sequential")})
        algorithm = registry.ALGORITHMS[algo].load()(factory.spec, config.algorithm, seed, "cpu", False)
        made.append(algorithm)
    first, second = made
    assert not np.array_equal(first.policy.weights, second.policy.weights)
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(first.policy.weights, second.policy.weights)
    assert torch.is_grad_enabled()
