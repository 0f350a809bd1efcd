"""Signs of life of Ray actors, through the cluster's own key-value store: an actor that hangs cannot be asked."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil
import ray
from ray._private import state
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from freerun.collectors.supervision import START_SECONDS, Silence, thread_stack
from freerun.core import RunSeed, WorkerHung, episode_seed
from freerun.transport.deaths import is_stopped
from freerun.transport.pulse import Vitals

FEWEST_SECONDS, MOST_SECONDS = 0.5, 10.0


def tell_every(step_timeout: float) -> float:
    return min(MOST_SECONDS, max(FEWEST_SECONDS, step_timeout / 8))


def tell(key: str, vitals: Vitals, every_seconds: float) -> None:
    """In an actor, from a thread of its own: how many steps it has made, and where it is if there was none since."""
    thread = threading.Thread(target=_tell, args=(key, vitals, every_seconds), name="freerun-vitals", daemon=True)
    thread.start()


def _tell(key: str, vitals: Vitals, every_seconds: float) -> None:
    last = -1
    while True:
        beats = vitals.beats
        stack = thread_stack(threading.main_thread().ident) if beats == last else ""
        content = {"beats": beats, "episode": vitals.episode, "stack": stack}
        with contextlib.suppress(RayError):  # the cluster ends: so will this process
            _internal_kv_put(key, json.dumps(content).encode(), overwrite=True)
        last = beats
        time.sleep(every_seconds)


@dataclass(frozen=True)
class Told:
    beats: int = 0
    episode: int = -1
    stack: str = ""


class Sickbay:
    """Finds the actors that hang, and ends those of this machine at once (Ray itself takes five seconds)."""

    def __init__(self, step_timeout: float, run_seed: RunSeed):
        self._timeout = step_timeout
        self._run_seed = run_seed
        self._every = tell_every(step_timeout)
        self._prefix = f"freerun-{secrets.token_hex(8)}"
        self._num_keys = 0
        self._told: dict[int, Told] = {}
        self._states: Mapping[int, str] = {}
        self._silence = Silence(self._every)
        self._next_look = time.monotonic()

    def new_key(self) -> str:
        """For an actor that is started now."""
        self._num_keys += 1
        return f"{self._prefix}-{self._num_keys}"

    def is_due(self) -> bool:
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + self._every
        return True

    def look(self, keys: Mapping[int, str], states: Mapping[int, str]) -> None:
        """At the actors of these workers, which are starting, busy or waiting."""
        self._told = {worker: _read(key) for worker, key in keys.items()}
        self._states = states
        self._silence.look({worker: (keys[worker], states[worker], self._told[worker].beats) for worker in keys})

    def judge(self, worker: int, actor_id: str) -> WorkerHung | None:
        """What to say of it if it hangs."""
        working = self._states[worker]
        seconds, told = self._silence.seconds(worker), self._told.get(worker, Told())
        if seconds < self._timeout:
            return None
        pid = _pid_on_this_node(actor_id)
        stopped = pid is not None and is_stopped(pid)
        limit = max(self._timeout, START_SECONDS) if working == "starting" else self._timeout
        exists = working != "starting" or is_alive(actor_id)  # or it waits for room in the cluster
        if not stopped and (working == "waiting" or not exists or seconds < limit):
            return None
        where = ""
        if told.episode >= 0:
            where = f" in episode {told.episode} (seed {episode_seed(self._run_seed, told.episode)})"
        stack = "it was stopped by a signal" if stopped else f"its stack:\n{told.stack or '(none: it did not answer)'}"
        failure = WorkerHung(
            f"worker {worker} showed no sign of life for {seconds:.1f} s{where} (--step-timeout {self._timeout:g}); "
            f"{stack}"
        )
        failure.from_outside = stopped
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return failure

    def is_late(self, worker: int) -> bool:
        """Whether it has been starting for longer than a step may take: it may be stopped, before Ray knows of it."""
        return self._states.get(worker) == "starting" and self._silence.seconds(worker) >= self._timeout

    def forget(self, key: str) -> None:
        with contextlib.suppress(RayError):
            _internal_kv_del(key)


def end_stopped(known: Collection[int]) -> None:
    """Processes of a private Ray that a signal has stopped as they started, beside those that are known: Ray itself
    would wait for them for ever."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            is_ray = process.cmdline()[0].startswith("ray::")
            if is_ray and process.pid not in known and process.status() == psutil.STATUS_STOPPED:
                process.kill()


def _read(key: str) -> Told:
    content = _internal_kv_get(key)
    return Told() if content is None else Told(**json.loads(content))


def is_alive(actor_id: str) -> bool:
    return bool(state.actors(actor_id).get("State") == "ALIVE")


def _pid_on_this_node(actor_id: str) -> int | None:
    known = state.actors(actor_id)
    here = ray.get_runtime_context().get_node_id()
    is_here = known.get("State") == "ALIVE" and known["Address"]["NodeID"] == here
    return int(known["Pid"]) if is_here and known.get("Pid") else None
