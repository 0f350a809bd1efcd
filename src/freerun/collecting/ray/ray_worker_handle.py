"""A worker in a Ray actor, as the fleet and the hang detector see it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ray.actor import ActorHandle
from ray.exceptions import RayError

from freerun.collecting.ray.ray_actor import ActorReady
from freerun.collecting.ray.ray_heartbeats import HeartbeatMessage, is_alive, pid_on_this_node, read_heartbeat
from freerun.collecting.workers.hang_detector import SignOfLife
from freerun.collecting.workers.worker_handle import WorkerHandle, WorkerLost
from freerun.core import WorkerHung
from freerun.transport import processes
from freerun.transport.exit_diagnosis import is_stopped

if TYPE_CHECKING:
    from freerun.collecting.ray.ray_workers import RayWorkers

MAX_CALLS = 2
"""Calls of one actor that are outstanding: the second begins when the first returns, without a message from here."""


class RayWorkerHandle(WorkerHandle):
    """A worker in a Ray actor."""

    def __init__(self, index: int, actor: ActorHandle, heartbeat_key: str, place: RayWorkers):
        super().__init__(index)
        self.actor = actor
        self.heartbeat_key = heartbeat_key
        """The key of the cluster's store under which the actor shows signs of life."""
        self.started: ActorReady | None = None
        """Where it runs, once it is ready."""
        self.publication = 0
        """The newest publication of weights that it has got."""
        self.num_calls = 0
        """Calls that have not returned."""
        self.failed_in: int | None = None
        """The last episode that it had begun when it reported a failure."""
        self._granted: list[int] = []  # units that no call has carried to it yet
        self._heartbeat = HeartbeatMessage()
        self._place = place

    @property
    def actor_id(self) -> str:
        return str(self.actor._actor_id.hex())

    def grant(self, unit: int) -> None:
        self._granted.append(unit)

    def flush(self) -> None:
        if self._granted and self.num_calls < MAX_CALLS:
            units, self._granted = self._granted, []
            self._place.call(self, units)
        # Units that it holds need a call to come back with; and a second call that waits there saves it a pause.
        if self.units and (self.num_calls == 0 or (len(self.units) > 1 and self.num_calls < MAX_CALLS)):
            self._place.call(self, [])

    def retire(self) -> None:
        self._place.retire(self)

    def suspect_episode(self) -> int | None:
        return self.failed_in if self.failed_in in self.units else None

    def last_begun_episode(self) -> int | None:
        return self.failed_in

    def sign_of_life(self) -> SignOfLife:
        with contextlib.suppress(RayError):  # the cluster ends: the fleet will notice
            self._heartbeat = read_heartbeat(self.heartbeat_key)
        return SignOfLife(self.heartbeat_key, self.activity(), self._heartbeat.beats)

    def episode(self) -> int | None:
        return self._heartbeat.episode if self._heartbeat.episode >= 0 else None

    def is_stopped(self) -> bool:
        pid = pid_on_this_node(self.actor_id)
        return pid is not None and is_stopped(pid)

    def has_place(self) -> bool:
        """Without a process, it waits for room in the cluster."""
        return is_alive(self.actor_id)

    def stack(self) -> str:
        return self._heartbeat.stack or "(none: it did not answer)"

    def note_slow_start(self) -> None:
        self._place.end_stopped_starts()

    def end_hung(self, failure: WorkerHung) -> None:
        """End the process at once where it runs on this machine, because Ray itself takes five seconds."""
        pid = pid_on_this_node(self.actor_id)
        if pid is not None:
            processes.kill(pid)
        self._place.hung.append(WorkerLost(self, failure))
