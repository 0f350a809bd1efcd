"""Reaching a Ray cluster, or starting a private one on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import ray
from ray._private import ray_constants, services
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray._raylet import Config
from ray.exceptions import RayError

from freerun.collecting.ray.ray_config import RayConfig
from freerun.core import UserError
from freerun.transport import processes
from freerun.transport.janitor import Janitor

logger = logging.getLogger("freerun")

PROBE_SECONDS = 3.0
"""`ray.init` waits for ten minutes where nobody answers, so the address is asked first."""
ROOM_SECONDS = 3.0
"""Ray offers CPUs that an earlier run has freed only a moment later."""
LOOK_SECONDS = 2.0
"""The time between two looks at which nodes there are."""
TOKEN = secrets.token_hex(32)
"""The token of private clusters: one per process, because Ray reads it only once. It is never written to a file."""
PRIVATE = {
    **processes.ONE_THREAD,
    # Processes of a machine that is no part of a cluster listen on 127.0.0.1 only; on Linux this must be set.
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would give its workers a lower priority than their learner (a niceness of 15). On a busy machine, a worker
    # that was killed would take many seconds to come back.
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "300",  # a hundred starting at once share few cores
}


@dataclass(frozen=True)
class ClusterConnection:
    """A connection to a cluster. Closing it ends what was started here; a Ray that the caller had started stays."""

    is_ours: bool
    is_private: bool
    janitor: Janitor | None = None

    def close(self) -> None:
        if self.is_ours:
            ray.shutdown()
        if self.janitor is not None:
            self.janitor.clean_up()


def connect(config: RayConfig, num_workers: int) -> ClusterConnection:
    """Use the Ray of this process, start a private one, or reach a cluster; and check that the workers fit into it."""
    runtime_env = _runtime_env(config.ray_runtime_env)
    if ray.is_initialized():
        if runtime_env:
            raise UserError("--ray-runtime-env comes too late, for ray.init() was called before: give it there")
        connection = ClusterConnection(is_ours=False, is_private=False)
    elif config.ray_address == "local":
        janitor = _start_private(num_workers, config.cpus_per_worker, runtime_env)
        return ClusterConnection(is_ours=True, is_private=True, janitor=janitor)
    else:
        _reach(config.ray_address, runtime_env)
        connection = ClusterConnection(is_ours=True, is_private=False)
    try:
        _check_room(num_workers, config.cpus_per_worker)
    except BaseException:
        connection.close()
        raise
    return connection


def _start_private(num_workers: int, cpus_per_worker: float, runtime_env: dict[str, object]) -> Janitor:
    """Start a Ray for this process alone: no dashboard, on 127.0.0.1, with a token that only its processes know."""
    num_cpus = max(os.cpu_count() or 1, num_workers, math.ceil(num_workers * cpus_per_worker))
    # More workers than cores are intended, and Ray would warn about them.
    intended = {"RAY_worker_maximum_startup_concurrency": str(num_cpus)}
    folder = Path(tempfile.gettempdir()) / f"freerun-ray-{secrets.token_hex(4)}"
    janitor = Janitor(folder)  # it exists before there is anything to clear away
    try:
        folder.mkdir(mode=0o700)
        with private_environment(), processes.environment(intended):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env=runtime_env or None,
                _temp_dir=str(folder),
            )
    except BaseException:
        janitor.clean_up()
        raise
    janitor.list_processes()
    return janitor


@contextlib.contextmanager
def private_environment() -> Iterator[None]:
    """Set the environment variables with which a private Ray must be started."""
    variables = dict(PRIVATE)
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        variables["RAY_AUTH_TOKEN"] = TOKEN
    variables["RAY_AUTH_MODE"] = "token"
    was_enabled = ray_constants.ENABLE_RAY_CLUSTER  # read from the environment when Ray was imported
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with processes.environment(variables):
            Config.initialize("")  # what Ray has read from the environment, again
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was_enabled


class NodeWatch:
    """Notices nodes that join the cluster and can run something."""

    def __init__(self) -> None:
        self.known = self._alive()
        self._next_look = time.monotonic() + LOOK_SECONDS

    def joined(self) -> set[str]:
        """Return the nodes that have joined since the last look; nothing if it is too early for another."""
        if time.monotonic() < self._next_look:
            return set()
        before, self.known = self.known, self._alive()
        self._next_look = time.monotonic() + LOOK_SECONDS
        return self.known - before

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}


def shortened(error: Exception) -> str:
    """Return the beginning and the end of an error of Ray, which may hold a whole log."""
    text = " ".join(str(error).split())
    return text if len(text) < 700 else f"{text[:300]} … {text[-400:]}"


# ---------------------------------------------------------------------------------------------- a cluster of others


def _reach(address: str, runtime_env: dict[str, object]) -> None:
    if not address.startswith("ray://"):
        try:
            address = services.canonicalize_bootstrap_address(address)  # what `auto` finds; not 127.0.0.1
        except ConnectionError:
            raise UserError(
                "--ray-address auto found no cluster on this machine: start one (docs/cluster.md says how), set "
                "RAY_ADDRESS, or leave --ray-address out for a private one"
            ) from None
    probe(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING, runtime_env=runtime_env or None)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"the Ray cluster at {address} cannot be used: {shortened(error)}") from None
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "the Ray cluster at %s asks for no token: whoever reaches its ports can run anything on it; "
            "docs/cluster.md says how to start one that does",
            address,
        )


def probe(address: str) -> None:
    """Raise at once if nobody answers at the address, if it is no Ray cluster, or if a token is missing."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    nobody = f"no Ray cluster answers at {address}: is it running, and is the port right?"
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except OSError as error:
        raise UserError(f"{nobody} ({error})") from None
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    channel = grpc.insecure_channel(f"{host}:{port}")
    try:
        grpc.channel_ready_future(channel).result(timeout=PROBE_SECONDS)
        question = "RayletDriver/ClusterInfo" if address.startswith("ray://") else "NodeInfoGcsService/GetClusterId"
        ask = channel.unary_unary(f"/ray.rpc.{question}")
        token = {name.lower(): value for name, value in get_auth_headers_if_auth_enabled({}).items()}
        ask(b"", timeout=PROBE_SECONDS, metadata=tuple(token.items()))
    except grpc.FutureTimeoutError:
        raise UserError(f"{nobody} (whoever listens there does not speak gRPC)") from None
    except grpc.RpcError as error:  # any other error is an answer to the empty request, so somebody is there
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise UserError(
                f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to the one that it was started with"
            ) from None
    finally:
        channel.close()


def _check_room(num_workers: int, cpus_per_worker: float) -> None:
    if cpus_per_worker == 0:
        return
    deadline = time.monotonic() + ROOM_SECONDS
    while True:
        sizes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources().get("CPU", 0.0)
        # A node runs whole workers only. 1e-6 makes up for rounding: 0.3 / 0.1 is a little less than 3.
        fitting = min(sum(int(size / cpus_per_worker) for size in sizes), int(free / cpus_per_worker + 1e-6))
        if fitting >= num_workers:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    nodes = "1 node" if len(sizes) == 1 else f"{len(sizes)} nodes"
    least = math.floor(1000 * free / num_workers) / 1000
    raise UserError(
        f"the Ray cluster has {sum(sizes):g} CPUs on {nodes}, {free:g} of them free, "
        f"and {num_workers} workers with {cpus_per_worker:g} each need {num_workers * cpus_per_worker:g}: "
        f"--num-workers {fitting} would fit, or --cpus-per-worker {least:g} (0 sets no limit)"
    )


def _runtime_env(path: str | None) -> dict[str, object]:
    """Read --ray-runtime-env: a folder becomes the working directory, a file holds Ray's own runtime_env as JSON."""
    if path is None:
        return {}
    if Path(path).is_dir():
        return {"working_dir": path}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read --ray-runtime-env {path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f'--ray-runtime-env {path} must hold a JSON object such as {{"working_dir": "."}}')
    return content
