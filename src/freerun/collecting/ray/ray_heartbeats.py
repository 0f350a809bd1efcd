"""Heartbeats of Ray actors, through the cluster's own key-value store: an actor that hangs cannot be asked."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import psutil
import ray
from ray._private import state
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from freerun.collecting.workers.hang_detector import thread_stack
from freerun.transport.heartbeats import Heartbeat

MIN_SECONDS, MAX_SECONDS = 0.5, 10.0
"""Every heartbeat is a request to the cluster's head, so there are not more of them than the timeout needs."""


def heartbeat_seconds(step_timeout: float) -> float:
    """Return the time between two heartbeats of an actor."""
    return min(MAX_SECONDS, max(MIN_SECONDS, step_timeout / 8))


@dataclass(frozen=True)
class HeartbeatMessage:
    """What an actor shows of itself."""

    beats: int = 0
    """Steps and resets that it has begun."""
    episode: int = -1
    """The last episode that it has begun; −1 before the first, as in `Heartbeat`."""
    stack: str = ""
    """Its Python stack, if it has made no step since the last message."""


# ---------------------------------------------------------------------------------------------- in the actor


def send_heartbeats(key: str, heartbeat: Heartbeat, every_seconds: float) -> None:
    """Start a thread of the actor that writes its heartbeat into the store again and again."""
    arguments = (key, heartbeat, every_seconds)
    threading.Thread(target=_send, args=arguments, name="freerun-heartbeat", daemon=True).start()


def _send(key: str, heartbeat: Heartbeat, every_seconds: float) -> None:
    last = -1
    while True:
        beats = heartbeat.num_beats
        stack = thread_stack(threading.main_thread().ident) if beats == last else ""
        content = {"beats": beats, "episode": heartbeat.episode, "stack": stack}
        with contextlib.suppress(RayError):  # the cluster ends, and this process with it
            _internal_kv_put(key, json.dumps(content).encode(), overwrite=True)
        last = beats
        time.sleep(every_seconds)


# ---------------------------------------------------------------------------------------------- in the learner


def new_heartbeat_key() -> str:
    return f"freerun-{secrets.token_hex(12)}"


def read_heartbeat(key: str) -> HeartbeatMessage:
    content = _internal_kv_get(key)
    return HeartbeatMessage() if content is None else HeartbeatMessage(**json.loads(content))


def delete_heartbeat(key: str) -> None:
    with contextlib.suppress(RayError):
        _internal_kv_del(key)


def is_alive(actor_id: str) -> bool:
    """True when an actor has a process. Before that it waits for room in the cluster."""
    return bool(state.actors(actor_id).get("State") == "ALIVE")


def pid_on_this_node(actor_id: str) -> int | None:
    """Return the process id of an actor that runs on this machine."""
    known = state.actors(actor_id)
    here = ray.get_runtime_context().get_node_id()
    is_here = known.get("State") == "ALIVE" and known["Address"]["NodeID"] == here
    return int(known["Pid"]) if is_here and known.get("Pid") else None


def end_stopped(known: Collection[int]) -> None:
    """End processes of a private Ray that a signal has stopped as they started, except those that are known."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            is_ray = process.cmdline()[0].startswith("ray::")
            if is_ray and process.pid not in known and process.status() == psutil.STATUS_STOPPED:
                process.kill()
