"""What only the `ray` mode does: a cluster to reach, weights by reference, several environments per actor, segments."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.modes.ray_mode import RayActors
from freerun.collecting.ray import ray_cluster
from freerun.collecting.ray.ray_config import RayConfig
from freerun.collecting.ray.ray_worker_handle import RayWorkerHandle
from freerun.collecting.ray.ray_workers import RayWorkers
from freerun.core import CollectorSettings, Demand, UserError

SETTINGS: dict[str, Any] = {"total_episodes": 60, "episodes_per_update": 20, "num_epochs": 2, "quiet": True}


@contextmanager
def collecting(
    env: str, config: RayConfig, num_workers: int = 2, max_lag: int = 1, **env_args: Any
) -> Iterator[RayActors]:
    factory = GymnasiumFactory(env, env_args)
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    collector = RayActors(factory, policy, CollectorSettings(num_workers, max_lag, seed=3), config)
    try:
        collector.publish(policy.weights, 0)
        yield collector
    finally:
        collector.close()


# ---------------------------------------------------------------------------------------------- collecting


@pytest.mark.usefixtures("ray_nodes")
def test_environments_that_share_an_actor_change_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "deterministic": True}
    reference = freerun.train("CartPole-v1", mode="sequential", run_dir=tmp_path / "one", **settings)
    result = freerun.train(
        "CartPole-v1", mode="ray", num_workers=2, envs_per_worker=3, run_dir=tmp_path / "many", **settings
    )
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)
    assert result.summary["ledger"] == reference.summary["ledger"]


@pytest.mark.usefixtures("ray_nodes")
def test_segments_go_on_where_the_last_one_ended() -> None:
    with collecting("toy_envs:Audit", RayConfig(envs_per_worker=3, segment_steps=16)) as collector:
        segments = [segment for _ in range(5) for segment in collector.collect(Demand(steps=300))]
    assert all(segment.reward.shape == (16, 3) for segment in segments)
    for segment in segments:
        inside = ~segment.ended[:-1]
        np.testing.assert_array_equal(segment.next_obs[:-1][inside], segment.obs[1:][inside])
        np.testing.assert_array_equal(segment.next_obs[..., 0], segment.obs[..., 0], err_msg="the mark of an episode")


@pytest.mark.usefixtures("ray_nodes")
def test_weights_are_put_once_per_version_and_go_to_each_actor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    told: list[int] = []
    original_put, original_call = ray.put, RayWorkers.call

    def noted_put(value: Any) -> Any:
        put.append(value)
        return original_put(value)

    def noted_call(self: RayWorkers, worker: RayWorkerHandle, units: list[int]) -> None:
        before = worker.publication
        original_call(self, worker, units)
        if worker.publication > before:
            told.append(worker.index)

    monkeypatch.setattr(ray, "put", noted_put)
    monkeypatch.setattr(RayWorkers, "call", noted_call)
    with collecting("toy_envs:Audit", RayConfig(), num_workers=2, max_lag=0, short=5, long=5) as collector:
        for version in range(3):
            segments = collector.collect(Demand(episodes=30))
            assert {int(step) for segment in segments for step in segment.version.ravel()} == {version}
            collector.publish(put[-1] + 1, version + 1)
        weights_seconds = collector.workers.weights_seconds
    assert len(put) == 1 + 4, "what actors are started with, and four versions"
    assert sorted(told) == [0, 0, 0, 1, 1, 1], "each actor is told of a version once, with its first call"
    assert weights_seconds > 0


@pytest.mark.usefixtures("ray_nodes")
def test_long_segments_are_read_where_they_lie_in_the_object_store() -> None:
    with collecting("toy_envs:Audit", RayConfig(), max_lag=0, short=4000, long=4000) as collector:
        segments = collector.collect(Demand(episodes=2))
    for segment in segments:
        assert not segment.obs.flags.owndata
        assert not segment.obs.flags.writeable
        np.testing.assert_array_equal(segment.reward[:, 0], np.arange(1, 4001))  # and stay readable


# ---------------------------------------------------------------------------------------------- clusters


@pytest.mark.usefixtures("ray_nodes")
def test_a_private_ray_listens_to_this_machine_only() -> None:
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    connections = [connection for process in family for connection in process.net_connections("inet")]
    listening = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_nobody_at_the_address_is_said_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no Ray cluster answers at 127\.0\.0\.1:9: .*refused"):
        ray_cluster.probe("127.0.0.1:9")
    assert time.monotonic() - started < 1


def test_somebody_else_at_the_address_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 0.5)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="does not speak gRPC"):
            ray_cluster.probe(f"ray://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_a_missing_token_is_said_at_once(ray_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "get_auth_headers_if_auth_enabled", lambda headers: {})
    with pytest.raises(UserError, match=r"asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN"):
        ray_cluster.probe(ray_nodes.address)


def test_a_cluster_is_reached_by_its_address_with_its_token(ray_nodes: Any, tmp_path: Path) -> None:
    command = ["train", "CartPole-v1", "--mode", "ray", "--ray-address", ray_nodes.address, "--num-workers", "2"]
    command += ["--total-episodes", "8", "--episodes-per-update", "4", "--run-dir", str(tmp_path / "run"), "--quiet"]
    with ray_cluster.private_environment():  # the token, and 127.0.0.1 as it is
        environment = dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "freerun", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Finished" in done.stdout
    assert "warn" not in done.stderr.lower()


@pytest.mark.usefixtures("ray_nodes")
def test_too_few_cpus_are_said_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "ROOM_SECONDS", 0.0)
    message = r"has 8 CPUs on 1 node, 8 of them free, and 5 workers with 2 each need 10: --num-workers 4 would fit, or "
    with (
        pytest.raises(UserError, match=message + r"--cpus-per-worker 1\.6"),
        collecting("toy_envs:Audit", RayConfig(cpus_per_worker=2), num_workers=5),
    ):
        pass


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    for name in ("ray", "ray_cluster"):
        monkeypatch.delitem(sys.modules, f"freerun.collecting.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"^--mode ray needs Ray: pip install 'freerun\[ray\]'$"):
        freerun.train("CartPole-v1", mode="ray", quiet=True, run_dir=run_dir)


@pytest.mark.usefixtures("ray_nodes")
def test_what_cannot_be_is_refused(run_dir: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mode": "ray", "quiet": True, "run_dir": run_dir}
    with pytest.raises(UserError, match=r"--ray-address is local, auto, HOST:PORT or ray://HOST:PORT, not 'there'"):
        freerun.train("CartPole-v1", ray_address="there", **settings)
    with pytest.raises(UserError, match="--cpus-per-worker must be 0 or more"):
        freerun.train("CartPole-v1", cpus_per_worker=-1.0, **settings)
    with pytest.raises(UserError, match="leave --segment-steps out"):
        freerun.train("CartPole-v1", segment_steps=8, deterministic=True, **settings)
    with pytest.raises(UserError, match="needs whole episodes: leave --segment-steps out"):
        freerun.train("CartPole-v1", segment_steps=8, episodes_per_update=3, **settings)
    with pytest.raises(UserError, match=r"cannot read --ray-runtime-env nowhere\.json"):
        freerun.train("CartPole-v1", ray_runtime_env="nowhere.json", **settings)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        freerun.train("CartPole-v1", ray_runtime_env=str(tmp_path / "list.json"), **settings)
    with pytest.raises(UserError, match="comes too late"):
        freerun.train("CartPole-v1", ray_runtime_env=str(tmp_path), **settings)
