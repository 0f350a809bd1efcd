"""Every kind of policy in every mode: the same weights, bit for bit, also when a run is resumed and replayed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policy_kinds import KINDS

import freerun
from freerun.run.replay_run import replay
from freerun.settings import registry

SPECIAL_SEGMENTS = ("masked-pairs", "masked-dqn", "gru", "combined", "stacked-frames")
"""Kinds whose segments hold more than others do."""
OF_MODE: dict[str, dict[str, Any]] = {
    "continuous": {"num_collectors": 2, "num_envs": 4, "collection_batch_size": 32},
    "batch": {"num_envs": 4, "num_steps_per_env": 16},
    "freerun": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
    "ray": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
}
LAGGING = [name for name, mode in registry.MODES.items() if not mode.traits.takes_turns]
WHOLE = [name for name, mode in registry.MODES.items() if mode.traits.whole_episodes]


def test_every_algorithm_has_a_kind() -> None:
    assert {kind.algo for kind in KINDS.values()} == set(registry.ALGORITHMS)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def trained(kind: str) -> freerun.Result:
        run_dir = tmp_path_factory.mktemp(kind) / "run"
        settings = KINDS[kind].train_settings()
        return freerun.train(**settings, deterministic=True, mode="sequential", total_episodes=12, run_dir=run_dir)

    return trained


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_ends_at_the_weights_of_sequential_also_when_resumed_and_replayed(
    kind: str, mode: str, references: Any, run_dir: Path
) -> None:
    # Ray's actors, and workers that import torch, take a second to start: there is one of them, and one start.
    is_slow = KINDS[kind].workers_need_torch or mode == "ray"
    workers = {} if mode == "sequential" else {"num_workers": 1 if is_slow else 2}
    settings = {**KINDS[kind].train_settings(), **workers, "deterministic": True}
    freerun.train(**settings, mode=mode, total_episodes=6, run_dir=run_dir)
    elsewhere: dict[str, Any] = {"mode": "sequential", "num_workers": 1} if is_slow else {}
    result = freerun.resume(run_dir, total_episodes=12, **elsewhere)
    expected = references(kind)
    np.testing.assert_array_equal(result.policy.weights, expected.policy.weights)
    for name in ("env_steps", "updates", "mean_return"):
        assert result.summary[name] == expected.summary[name], name
    assert result.summary["updates"] >= 3
    again = replay(run_dir)
    assert again.is_same
    np.testing.assert_array_equal(again.weights, expected.policy.weights)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.workers_need_torch])
def test_a_run_with_lag_is_replayed_bit_for_bit(kind: str, run_dir: Path) -> None:
    settings = {**KINDS[kind].train_settings(), "checkpoint_every": "1", "max_lag": 2, "num_workers": 2}
    result = freerun.train(**settings, mode="freerun", total_episodes=18, run_dir=run_dir)
    assert result.summary["lag_max"] >= 1, "nothing that a run without lag would not have shown"
    again = replay(run_dir)
    assert again.is_same
    np.testing.assert_array_equal(again.weights, result.policy.weights)


@pytest.mark.parametrize("mode", LAGGING)
@pytest.mark.parametrize("kind", SPECIAL_SEGMENTS)
def test_segments_with_lag_in_every_mode(kind: str, mode: str, run_dir: Path) -> None:
    """Environments with masks raise at an action that is not allowed: a mask that got lost would be an incident."""
    settings = {**KINDS[kind].train_settings(), "episodes_per_update": None, "steps_per_update": 64}
    settings = {name: value for name, value in settings.items() if value is not None}
    own = OF_MODE.get(mode, {"num_workers": 2})
    result = freerun.train(**settings, mode=mode, total_steps=256, run_dir=run_dir, **own)
    assert result.summary["env_steps"] >= 256
    assert not (run_dir / "incidents.jsonl").exists()
