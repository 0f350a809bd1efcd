"""Actors, nodes and objects that are lost: their episodes are run again, with the same result; new nodes get work."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectLostError
from worker_processes import after_updates

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.modes.ray_mode import RayActors
from freerun.collecting.ray import ray_cluster, replacement_waits
from freerun.collecting.ray.ray_actor import PlayedUnits
from freerun.collecting.ray.ray_cluster import private_environment
from freerun.collecting.ray.ray_config import RayConfig
from freerun.collecting.ray.ray_heartbeats import end_stopped
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.core import CollectorSettings, Demand, UserError
from freerun.telemetry.ledger import Ledger
from freerun.transport.exit_diagnosis import is_stopped

SETTINGS: dict[str, Any] = {"total_episodes": 60, "episodes_per_update": 20, "num_epochs": 1, "quiet": True}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> freerun.Result:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    return freerun.train("toy_envs:Audit", **SETTINGS, mode="sequential", deterministic=True, run_dir=run_dir)


@pytest.fixture
def second_node(ray_nodes: Any) -> Iterator[Any]:
    with private_environment():
        node = ray_nodes.add_node(num_cpus=8)
    yield node
    if node in ray_nodes.worker_nodes:
        ray_nodes.remove_node(node)
    ray_nodes.wait_for_nodes()  # the next test must not see it


def test_a_node_removed_in_the_middle_of_a_run_changes_nothing(
    ray_nodes: Any, second_node: Any, undisturbed: freerun.Result, run_dir: Path
) -> None:
    with after_updates(run_dir, 1, lambda: ray_nodes.remove_node(second_node, allow_graceful=False)):
        result = freerun.train(
            "toy_envs:Audit",
            **SETTINGS,
            env_args={"step_seconds": 0.002},  # takes longer, and changes nothing
            mode="ray",
            num_workers=4,
            max_lag=0,
            deterministic=True,
            run_dir=run_dir,
        )
    np.testing.assert_array_equal(result.policy.weights, undisturbed.policy.weights)
    # Half of the actors were there; one may be sent there once more before Ray has noticed.
    assert result.summary["worker_restarts"] >= 2
    ledger = result.summary["ledger"]
    assert ledger["rerun"] >= 1
    assert ledger["started"] == ledger["trained"] == 60
    assert ledger["episodes_by_length"] == undisturbed.summary["ledger"]["episodes_by_length"]


def test_a_node_that_joins_gets_work(ray_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "LOOK_SECONDS", 0.2)
    factory = GymnasiumFactory("toy_envs:Audit", {"short": 5, "long": 5})
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    collector = RayActors(factory, policy, CollectorSettings(4, 1, seed=3), RayConfig())
    ledger = Ledger()
    node = None
    try:
        collector.publish(policy.weights, 0)
        places: Counter[str] = Counter()
        deadline = time.monotonic() + 30
        while sorted(places.values()) != [2, 2] and time.monotonic() < deadline:
            ledger.account(collector.collect(Demand(episodes=20)))
            ledger.finish_update()
            ledger.check_balance(collector.counts())
            if node is None:
                with private_environment():
                    node = ray_nodes.add_node(num_cpus=8)
            places = Counter(worker.started.node for worker in collector.workers.handles() if worker.started)
            time.sleep(0.02)
        assert sorted(places.values()) == [2, 2]
        assert collector.counts().worker_restarts == 0
        assert collector.counts().episodes_rerun == 0
    finally:
        collector.close()
        if node is not None:
            ray_nodes.remove_node(node)
            ray_nodes.wait_for_nodes()


@pytest.mark.usefixtures("ray_nodes")
def test_a_lost_result_is_run_again(
    monkeypatch: pytest.MonkeyPatch, undisturbed: freerun.Result, run_dir: Path
) -> None:
    lost: list[Any] = []
    original_get = ray.get

    def lose_one(reference: Any) -> Any:
        result = original_get(reference)
        if isinstance(result, PlayedUnits) and not lost:
            lost.append(reference)
            raise ObjectLostError(reference.hex(), b"", "")
        return result

    monkeypatch.setattr(ray, "get", lose_one)
    result = freerun.train("toy_envs:Audit", **SETTINGS, mode="ray", num_workers=2, deterministic=True, run_dir=run_dir)
    assert lost
    np.testing.assert_array_equal(result.policy.weights, undisturbed.policy.weights)
    assert result.summary["worker_restarts"] == 1
    assert result.summary["ledger"]["started"] == result.summary["ledger"]["trained"] == 60
    assert result.summary["ledger"]["rerun"] >= 1


@pytest.mark.usefixtures("ray_nodes")
def test_a_spare_worker_takes_the_place_of_one_that_was_killed() -> None:
    factory = GymnasiumFactory("toy_envs:Audit", {"short": 5, "long": 5})
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    collector = RayActors(factory, policy, CollectorSettings(2, 1, seed=3), RayConfig(spare_workers=1))
    ledger = Ledger()

    def play_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            ledger.account(collector.collect(Demand(episodes=10)))
            ledger.finish_update()
            ledger.check_balance(collector.counts())
        assert condition()

    try:
        collector.publish(policy.weights, 0)
        play_until(lambda: bool(collector.workers.spare_actors()))
        (spare,) = collector.workers.spare_actors()
        lost = collector.workers.handles()[0]
        assert lost.started
        os.kill(lost.started.pid, signal.SIGKILL)
        play_until(lambda: spare in [worker.actor for worker in collector.workers.handles() if worker.started])
        play_until(lambda: bool(collector.workers.spare_actors()))
        assert spare not in collector.workers.spare_actors(), "another one stands by"
        assert collector.counts().worker_restarts == 1
    finally:
        collector.close()


@ray.remote
class Tenant:
    """Takes the room that a worker leaves."""


@pytest.mark.usefixtures("ray_nodes")
def test_a_run_says_what_it_waits_for_when_ray_does_not_replace_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The workers fill the cluster. Somebody else waits for room, and gets that of the worker which is killed."""
    monkeypatch.setattr(replacement_waits, "FIRST_WARNING_SECONDS", 0.5)
    # The replacement comes two seconds later, so that it is sure to find the room taken.
    failed = RestartPolicy.failed
    monkeypatch.setattr(RestartPolicy, "failed", lambda self, *rest: max(2.0, failed(self, *rest)))
    factory = GymnasiumFactory("toy_envs:Audit", {"step_seconds": 0.002})
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    collector = RayActors(factory, policy, CollectorSettings(2, 0, seed=3), RayConfig(cpus_per_worker=4.0))
    tenant = Tenant.options(num_cpus=4).remote()  # type: ignore[attr-defined]

    # Not caplog: in full runs of all tests it has stayed empty here, and nobody knows why.
    messages: list[str] = []
    monkeypatch.setattr(replacement_waits.logger, "warning", lambda text, *rest: messages.append(text % rest))

    def said(text: str) -> bool:
        return any(text in message for message in messages)

    def play_until_said(text: str) -> None:
        """Ray tells of an actor's death only to those who call it: so the others play on meanwhile."""
        deadline = time.monotonic() + 60
        while not said(text) and time.monotonic() < deadline:
            assert collector.collect(Demand(episodes=4))
        assert said(text), (messages, collector.counts(), [worker.index for worker in collector.roster.workers()])

    try:
        collector.publish(policy.weights, 0)
        (lost,) = [worker for worker in collector.workers.handles() if worker.index == 1]
        assert lost.started
        os.kill(lost.started.pid, signal.SIGKILL)
        play_until_said("worker 1: waiting for Ray to start its replacement, ")
        ray.kill(tenant)
        play_until_said("worker 1: its replacement is ready, after ")
        assert collector.counts().worker_restarts == 1
    finally:
        collector.close()
        ray.kill(tenant)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_process_of_ray_that_was_stopped_as_it_started_is_ended(is_known: bool) -> None:
    process = subprocess.Popen(["ray::FreerunActor.__init__", "60"], executable="/bin/sleep")
    try:
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            time.sleep(0.01)
        end_stopped({process.pid} if is_known else set())
        if is_known:
            assert process.poll() is None
        else:
            assert process.wait(10) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_how_many_stand_by() -> None:
    assert RayConfig().num_spares(3, is_private=True) == 3
    assert RayConfig().num_spares(100, is_private=True) == 4
    assert RayConfig().num_spares(3, is_private=False) == 0
    assert RayConfig(spare_workers=2).num_spares(8, is_private=False) == 2
    with pytest.raises(UserError, match="--spare-workers must be 0 or more"):
        RayConfig(spare_workers=-1)
