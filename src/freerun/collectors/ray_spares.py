"""Ray actors that stand by: a process of Ray's own takes a second of a core to start, one that waits takes none."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from freerun.collectors.ray_actor import FreerunActor
from freerun.collectors.ray_vitals import is_alive
from freerun.transport import processes

logger = logging.getLogger("freerun")


class Actors:
    """Creates them, and keeps spare ones: they have imported everything and built nothing.

    Spare ones are made one after another, and only while the run is otherwise whole: a run that has lost its workers
    needs the cores for those.
    """

    def __init__(self, setup: ray.ObjectRef, cpus: float, num_spares: int, is_private: bool, timeout: float):
        self._setup = setup
        self._cpus = cpus
        self._cpus_of_spares = 0.0 if is_private else cpus  # a private Ray has room for the workers, and no other user
        self._num_spares = num_spares
        self._spares: list[ActorHandle] = []
        self._timeout = timeout
        self._late_at = math.inf
        self._coming: tuple[ray.ObjectRef, ActorHandle] | None = None

    def take(self, node: str | None = None) -> ActorHandle:
        """One that waits, or a new one; a new one in any case where it must be on a certain node."""
        while node is None and self._spares:
            spare = self._spares.pop()
            if is_alive(spare._actor_id.hex()):
                return spare
        if node is None and self._coming is not None:  # it may hold the room that the worker had
            (_, actor), self._coming = self._coming, None
            return actor
        return self._create(self._cpus, node)

    def tend(self) -> None:
        """When all workers are there: see to the spare ones."""
        if self._coming is not None:
            self._look_at_coming()
        elif len(self._spares) < self._num_spares:
            actor = self._create(self._cpus_of_spares)
            self._coming = actor.warm.remote(), actor
            self._late_at = time.monotonic() + self._timeout

    def is_late(self) -> bool:
        """Whether a spare one takes longer to come than a step may take."""
        return self._coming is not None and time.monotonic() > self._late_at

    def _look_at_coming(self) -> None:
        assert self._coming is not None
        reference, actor = self._coming
        if not ray.wait([reference], timeout=0)[0]:
            return
        self._coming = None
        try:
            failure = ray.get(reference)
        except RayError:  # it was killed: another one comes next
            return
        if failure is None:
            self._spares.append(actor)
        else:  # workers, which need the same and more, tell of it
            logger.info("no worker stands by: %s", failure)
            self._num_spares = 0

    def close(self) -> None:
        waiting = [*self._spares, *([self._coming[1]] if self._coming is not None else [])]
        self._spares, self._coming = [], None
        for actor in waiting:
            with contextlib.suppress(RayError):
                ray.kill(actor)

    def _create(self, cpus: float, node: str | None = None) -> ActorHandle:
        where: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
        # Up to one CPU, Ray itself sees to it that numpy has one thread.
        runtime_env = {"env_vars": processes.ONE_THREAD} if self._cpus > 1 else None
        actor = ray.remote(FreerunActor).options(
            num_cpus=cpus, scheduling_strategy=where, max_restarts=0, max_task_retries=0, runtime_env=runtime_env
        )
        return actor.remote(self._setup)
