"""What only the `freerun` mode does: several environments per worker, segments, slots shorter than episodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.modes.freerun import Freerun, FreerunConfig
from freerun.collecting.workers import slot_workers
from freerun.core import CollectorSettings, Demand, UserError
from freerun.transport import processes

SETTINGS: dict[str, Any] = {
    "total_episodes": 60,
    "episodes_per_update": 20,
    "minibatch_size": 128,
    "num_epochs": 2,
    "quiet": True,
}


@contextmanager
def collecting(
    env: str, config: FreerunConfig, num_workers: int = 2, max_lag: int = 1, **env_args: Any
) -> Iterator[Freerun]:
    factory = GymnasiumFactory(env, env_args)
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    collector = Freerun(factory, policy, CollectorSettings(num_workers, max_lag, seed=3), config)
    try:
        collector.publish(policy.weights, 0)
        yield collector
    finally:
        collector.close()


@pytest.mark.parametrize(("num_workers", "envs_per_worker"), [(1, 3), (2, 8)])
def test_environments_that_share_a_worker_change_nothing(
    num_workers: int, envs_per_worker: int, tmp_path: Path
) -> None:
    reference = freerun.train(
        "CartPole-v1", mode="sequential", deterministic=True, run_dir=tmp_path / "one", **SETTINGS
    )
    result = freerun.train(
        "CartPole-v1",
        mode="freerun",
        num_workers=num_workers,
        envs_per_worker=envs_per_worker,
        deterministic=True,
        run_dir=tmp_path / "many",
        **SETTINGS,
    )
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)
    assert result.summary["ledger"] == reference.summary["ledger"]


def test_episodes_longer_than_a_slot_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_workers, "SLOT_BYTES", 1)  # the least is 16 steps
    with collecting("toy_envs:Audit", FreerunConfig(envs_per_worker=3)) as collector:
        segments = collector.collect(Demand(episodes=20))
    assert {segment.num_steps for segment in segments} == {20, 200}
    for segment in segments:
        np.testing.assert_array_equal(segment.reward[:, 0], np.arange(1, segment.num_steps + 1))


def test_segments_hold_all_of_a_workers_environments(tmp_path: Path) -> None:
    with collecting("toy_envs:Audit", FreerunConfig(envs_per_worker=5, segment_steps=16)) as collector:
        segments = [segment for _ in range(5) for segment in collector.collect(Demand(steps=300))]
    assert all(segment.reward.shape == (16, 5) for segment in segments)
    assert len(segments) == 5 * 4, "300 steps are four segments of 80"
    for segment in segments:
        inside = ~segment.ended[:-1]
        np.testing.assert_array_equal(segment.next_obs[:-1][inside], segment.obs[1:][inside])
        np.testing.assert_array_equal(segment.next_obs[..., 0], segment.obs[..., 0], err_msg="the mark of an episode")


def test_what_does_not_go_together_is_refused(run_dir: Path) -> None:
    with pytest.raises(UserError, match="leave --segment-steps out"):
        freerun.train("CartPole-v1", segment_steps=8, deterministic=True, quiet=True, run_dir=run_dir)
    with pytest.raises(UserError, match="needs whole episodes: leave --segment-steps out"):
        freerun.train("CartPole-v1", segment_steps=8, episodes_per_update=3, quiet=True, run_dir=run_dir)
    with pytest.raises(UserError, match="it belongs to --mode freerun"):
        freerun.train("CartPole-v1", mode="pipes", segment_steps=8, quiet=True, run_dir=run_dir)
    with pytest.raises(UserError, match="--envs-per-worker must be at least 1"):
        freerun.train("CartPole-v1", envs_per_worker=0, quiet=True, run_dir=run_dir)


def test_pinned_workers_stay_on_one_core() -> None:
    with collecting("toy_envs:Audit", FreerunConfig(pin_workers=True), num_workers=3) as collector:
        collector.collect(Demand(episodes=3))
        pids = [worker.sign_of_life().identity for worker in collector.roster.workers()]
        cores = [tuple(psutil.Process(pid).cpu_affinity() or ()) for pid in pids]  # type: ignore[arg-type]
    assert all(len(core) == 1 for core in cores)
    assert len(set(cores)) == min(3, len(processes.usable_cores()))


def test_pinning_is_refused_where_the_system_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_setaffinity")
    with (
        pytest.raises(UserError, match="--pin-workers needs Linux"),
        collecting("toy_envs:Audit", FreerunConfig(pin_workers=True)),
    ):
        pass
