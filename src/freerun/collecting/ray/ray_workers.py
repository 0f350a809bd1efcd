"""Workers in Ray actors, on any number of machines: they are called with units and return what they have finished."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable

import cloudpickle
import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from freerun.collecting.ray.ray_actor import ActorFailed, ActorReady, ActorSetup, PlayedUnits
from freerun.collecting.ray.ray_cluster import NodeWatch, connect, shortened
from freerun.collecting.ray.ray_config import RayConfig
from freerun.collecting.ray.ray_heartbeats import (
    delete_heartbeat,
    end_stopped,
    heartbeat_seconds,
    new_heartbeat_key,
)
from freerun.collecting.ray.ray_spares import ActorSpares
from freerun.collecting.ray.ray_worker_handle import RayWorkerHandle
from freerun.collecting.ray.replacement_waits import ReplacementWaits
from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.collecting.workers.worker_handle import (
    Report,
    UnitFinished,
    WorkerHandle,
    WorkerLost,
    WorkerPlace,
    WorkerReady,
)
from freerun.core import (
    CollectorSettings,
    EnvFactory,
    EnvFailure,
    FloatArray,
    OutOfMemory,
    Policy,
    State,
    WorkerDied,
)
from freerun.transport.exit_diagnosis import out_of_memory_failure
from freerun.transport.memory_kills import OutOfMemoryKills

logger = logging.getLogger("freerun")

WAIT_SECONDS = 0.01
"""`ray.wait` cannot be woken up, so what the learner allows to start is granted this much later at most."""
CLOSE_SECONDS = 1.0
WARNING_SECONDS = 60.0
"""After this time without any worker, the user is told."""


class RayWorkers(WorkerPlace):
    """Ray actors that play whole episodes.

    An actor that dies, alone or with its node, hangs or raises is created again wherever Ray finds room. An actor whose
    result is lost counts as dead, so nothing of it can arrive twice.
    """

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: RayConfig):
        self.weights_seconds = 0.0
        """What actors have spent on taking weights, all together."""
        self.publish_seconds = 0.0
        self.hung: deque[WorkerLost] = deque()
        """Workers that the hang detector has ended. Its thread appends, the fleet's thread takes: both are atomic."""
        self.look_seconds = heartbeat_seconds(settings.step_timeout)
        self._num_workers = settings.num_workers
        self._tracks = settings.tracks
        # The reference, its version, and a count that unlike versions goes on from one training to the next.
        self._published: tuple[list[ray.ObjectRef], int, int] = [], 0, 0
        self._handles: list[RayWorkerHandle] = []
        self._calls: dict[ray.ObjectRef, RayWorkerHandle] = {}
        self._destinations: dict[int, str] = {}  # by worker: the node that its successor is to start on
        self._waits = ReplacementWaits()
        self._next_warning = math.inf
        self._memory = OutOfMemoryKills()
        self._woken = threading.Event()
        self._spares: ActorSpares | None = None
        self._connection = connect(config, settings.num_workers)
        try:
            setup = ray.put(
                ActorSetup(
                    cloudpickle.dumps((factory, policy)),
                    settings.seed,
                    config.envs_per_worker,
                    config.segment_steps,
                    settings.num_workers,
                    self.look_seconds,
                    tuple(path for path in sys.path if path),
                )
            )
            is_private = self._connection.is_private
            num_spares = config.num_spares(settings.num_workers, is_private)
            self._spares = ActorSpares(setup, config.cpus_per_worker, num_spares, is_private, settings.step_timeout)
            self._nodes = NodeWatch()
        except BaseException:
            self._connection.close()
            raise

    def start(self, index: int) -> RayWorkerHandle:
        assert self._spares is not None
        actor = self._spares.take(self._destinations.pop(index, None))
        handle = RayWorkerHandle(index, actor, new_heartbeat_key(), self)
        self._handles.append(handle)
        self._expect(handle, actor.start.remote(self._first_episode(index), handle.heartbeat_key))
        return handle

    def handles(self) -> list[RayWorkerHandle]:
        """Return the workers that are there now. The copy may be used in any thread."""
        return list(self._handles)

    def spare_actors(self) -> list[ActorHandle]:
        return [] if self._spares is None else self._spares.spares()

    def _first_episode(self, index: int) -> int:
        return 0  # whole episodes are granted by number

    def publish(self, weights: FloatArray, version: int) -> None:
        """Put the weights into the object store once; each actor fetches them with its next call."""
        started = time.perf_counter()
        reference = ray.put(weights)
        _, _, publication = self._published
        self._published = [reference], version, publication + 1
        self.publish_seconds += time.perf_counter() - started

    def call(self, handle: RayWorkerHandle, units: list[int]) -> None:
        """Have an actor take these units too, and return what it has finished."""
        weights, version, publication = self._published
        is_new = publication > handle.publication
        handle.publication = publication
        self._expect(handle, handle.actor.play.remote(units, version, weights if is_new else []))

    def _expect(self, handle: RayWorkerHandle, reference: ray.ObjectRef) -> None:
        self._calls[reference] = handle
        handle.num_calls += 1

    def wake(self) -> None:
        self._woken.set()

    # ------------------------------------------------------------------------------------------ the fleet's thread

    def wait(self, seconds: float | None) -> list[Report]:
        reports: list[Report] = []
        # These first: `_lose` forgets the calls of a hung actor, so what it may still return is ignored below.
        while self.hung:
            lost = self.hung.popleft()
            if lost.worker in self._handles:
                reports.append(self._lose(lost.worker, lost.failure))
        for reference in self._arrived(seconds):
            if reference in self._calls:  # not of an actor that was given up a moment ago
                reports += self._receive(reference)
        self._maintain()
        return reports

    def _arrived(self, seconds: float | None) -> list[ray.ObjectRef]:
        """Return the calls that have returned or failed."""
        timeout = WAIT_SECONDS if seconds is None else min(seconds, WAIT_SECONDS)
        if not self._calls:
            self._woken.wait(timeout)
            self._woken.clear()
            return []
        ready: list[ray.ObjectRef]
        ready, others = ray.wait(list(self._calls), num_returns=1, timeout=timeout)
        if ready and others:  # others that have arrived meanwhile are served in the same turn, without waiting
            ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return ready

    def _receive(self, reference: ray.ObjectRef) -> list[Report]:
        handle = self._calls.pop(reference)
        handle.num_calls -= 1
        try:
            reply = ray.get(reference)
        except RayTaskError as error:
            is_rays_own = isinstance(error.cause, RayError)
            failure = self._death(handle, error) if is_rays_own else EnvFailure(f"a worker failed:\n{error}")
            return [self._lose(handle, failure)]
        except RayError as error:
            return [self._lose(handle, self._death(handle, error))]
        if isinstance(reply, ActorFailed):
            handle.failed_in = reply.last_begun_episode
            return [self._lose(handle, reply.failure)]
        if isinstance(reply, ActorReady):
            handle.started = reply
            self._waits.end(handle.index)
            self._tracks.set_state(handle.index, State.WAITING_FOR_WEIGHTS)
            return [WorkerReady(handle)]
        assert isinstance(reply, PlayedUnits)
        return self._unpack(handle, reply)

    def _unpack(self, handle: RayWorkerHandle, reply: PlayedUnits) -> list[Report]:
        self.weights_seconds += reply.weights_seconds
        # The actor's clock may be another machine's, so the call ends, for the tracks, when it is received.
        now = time.perf_counter()
        self._tracks.set_state(handle.index, State.BUSY, at=now - reply.seconds)
        self._tracks.set_state(handle.index, State.WAITING_FOR_WEIGHTS, at=now)
        if not reply.segments:
            handle.flush()  # a call is free again, and nothing else will say so
        return [UnitFinished(handle, unit, segment) for unit, segment in reply.segments.items()]

    def _death(self, handle: RayWorkerHandle, error: RayError) -> EnvFailure:
        died = f"worker {handle.index} died: {shortened(error)}"
        if isinstance(error, OutOfMemoryError):
            failure: EnvFailure = OutOfMemory(died)
        else:  # only its own machine knows how it ended
            is_here = self._connection.is_private
            failure = (out_of_memory_failure(died, self._memory) if is_here else None) or WorkerDied(died)
        failure.from_outside = failure.may_be_the_environment = True  # its exit code is lost, so nobody knows
        return failure

    def _lose(self, handle: WorkerHandle, failure: Exception | None) -> WorkerLost:
        self._forget(handle)
        self._waits.begin(handle.index)
        return WorkerLost(handle, failure)

    def _forget(self, worker: WorkerHandle) -> None:
        """Ignore an actor from now on, whatever it may still do, and have it killed."""
        handle = next(handle for handle in self._handles if handle is worker)
        self._handles.remove(handle)
        delete_heartbeat(handle.heartbeat_key)
        self._calls = {reference: other for reference, other in self._calls.items() if other is not handle}
        with contextlib.suppress(RayError):
            ray.kill(handle.actor)

    # ------------------------------------------------------------------------------------------ nodes, spares, warnings

    def _num_ready(self) -> int:
        return sum(handle.started is not None for handle in self._handles)

    def _maintain(self) -> None:
        """Do what is due besides serving replies: new nodes, spare actors, stuck starts, and warnings."""
        assert self._spares is not None
        self._memory.refresh()
        if self._num_ready() == self._num_workers:
            self._balance_nodes()
            self._spares.refill()
        if self._spares.is_late():
            self.end_stopped_starts()
        self._warn_if_nobody_works()
        self._waits.warn(self._awaited)

    def _balance_nodes(self) -> None:
        """Give a node that has joined its share of the workers. Ray itself places those that had found no room."""
        if self._connection.is_private:
            return
        for node in self._nodes.joined():
            self._move_some_to(node, self._num_workers // len(self._nodes.known))

    def _move_some_to(self, node: str, share: int) -> None:
        """Mark workers of the most crowded nodes as outdated, so that the fleet replaces them when they are idle."""
        places = {handle: handle.started.node for handle in self._handles if handle.started}
        for _ in range(share - list(places.values()).count(node)):
            (crowded, _), *_ = Counter(place for place in places.values() if place != node).most_common(1)
            handle = next(handle for handle, place in places.items() if place == crowded)
            self._destinations[handle.index] = places[handle] = node
            handle.is_outdated = True

    def end_stopped_starts(self) -> None:
        """End processes of a private Ray that a signal has stopped as they started: Ray would wait for ever."""
        if self._connection.is_private:
            end_stopped({handle.started.pid for handle in list(self._handles) if handle.started})

    def _warn_if_nobody_works(self) -> None:
        now = time.monotonic()
        if self._num_ready():
            self._next_warning = now + WARNING_SECONDS
        elif now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            logger.warning("no worker is left: the run waits for room in the cluster")

    def _awaited(self, index: int) -> str:
        """Return what the run waits for in the place of a lost worker."""
        handle = next((handle for handle in self._handles if handle.index == index), None)
        if handle is None:
            return "its turn to be started again, after repeated failures"
        return "its replacement to build its environment" if handle.has_place() else "Ray to start its replacement"

    # ------------------------------------------------------------------------------------------ the end

    def retire(self, handle: RayWorkerHandle) -> None:
        _close_actors([handle])
        self._forget(handle)

    def close(self) -> None:
        handles = list(self._handles)
        if ray.is_initialized():
            if self._spares is not None:
                self._spares.close()
            _close_actors(handles)
            for handle in handles:
                self._forget(handle)
            here = ray.get_runtime_context().get_node_id()
            _wait_for_end([handle.started.pid for handle in handles if handle.started and handle.started.node == here])
        self._connection.close()


class RaySegmentWorkers(RayWorkers):
    """Ray actors that play segments. They continue their own environments, so they are never moved to another node."""

    def __init__(
        self,
        factory: EnvFactory,
        policy: Policy,
        settings: CollectorSettings,
        config: RayConfig,
        accounting: EpisodeAccounting,
    ):
        self._accounting = accounting
        super().__init__(factory, policy, settings, config)

    def _first_episode(self, index: int) -> int:
        return self._accounting.next_episode(index)

    def _balance_nodes(self) -> None:
        """Moving one would cut its episodes."""


def _close_actors(handles: Iterable[RayWorkerHandle]) -> None:
    """Let actors close their environments, as far as they do so in time."""
    with contextlib.suppress(RayError):
        calls = [handle.actor.close.remote() for handle in handles]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=CLOSE_SECONDS)


def _wait_for_end(pids: list[int]) -> None:
    """Ray kills a process some time after it was asked to."""
    deadline = time.monotonic() + CLOSE_SECONDS
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.005)
