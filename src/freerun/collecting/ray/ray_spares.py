"""Spare Ray actors: a new process of Ray takes a second of a core to start, a spare one that waits takes none."""

from __future__ import annotations

import contextlib
import logging
import math
import time

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from freerun.collecting.ray.ray_actor import ActorFailed, FreerunActor
from freerun.collecting.ray.ray_heartbeats import is_alive
from freerun.transport import processes

logger = logging.getLogger("freerun")


class ActorSpares:
    """Creates actors and keeps spare ones, which have imported everything and built nothing.

    Spare actors are made one after another, and only while all workers are ready: a run that has lost workers needs
    its cores for their replacements.
    """

    def __init__(self, setup: ray.ObjectRef, cpus: float, num_spares: int, is_private: bool, timeout: float):
        self._setup = setup
        self._cpus = cpus
        # A private Ray has cores reserved for the workers, and no other user.
        self._cpus_of_spares = 0.0 if is_private else cpus
        self._num_spares = num_spares
        self._spares: list[ActorHandle] = []
        self._timeout = timeout
        self._late_at = math.inf
        self._starting: tuple[ray.ObjectRef, ActorHandle] | None = None

    def take(self, node: str | None = None) -> ActorHandle:
        """Return a spare actor, or a new one; always a new one where it must be on a certain node."""
        while node is None and self._spares:
            spare = self._spares.pop()
            if is_alive(spare._actor_id.hex()):
                return spare
        if node is None and self._starting is not None:  # it may occupy the CPU that the lost worker had
            (_, actor), self._starting = self._starting, None
            return actor
        return self._create(self._cpus, node)

    def refill(self) -> None:
        """Make a spare actor if one is missing. This is called while all workers are ready."""
        if self._starting is not None:
            self._check_starting()
        elif len(self._spares) < self._num_spares:
            actor = self._create(self._cpus_of_spares)
            self._starting = actor.warm.remote(), actor
            self._late_at = time.monotonic() + self._timeout

    def spares(self) -> list[ActorHandle]:
        """Return the spare actors that are ready."""
        return list(self._spares)

    def is_late(self) -> bool:
        """True when a spare actor takes longer to start than a step may take."""
        return self._starting is not None and time.monotonic() > self._late_at

    def _check_starting(self) -> None:
        assert self._starting is not None
        reference, actor = self._starting
        if not ray.wait([reference], timeout=0)[0]:
            return
        self._starting = None
        try:
            failed: ActorFailed | None = ray.get(reference)
        except RayError:  # it was killed: another one is made next
            return
        if failed is None:
            self._spares.append(actor)
        else:  # workers need the same and more, so they report it
            logger.info("there is no spare worker: %s", failed.failure)
            self._num_spares = 0

    def close(self) -> None:
        waiting = [*self._spares, *([self._starting[1]] if self._starting is not None else [])]
        self._spares, self._starting = [], None
        for actor in waiting:
            with contextlib.suppress(RayError):
                ray.kill(actor)

    def _create(self, cpus: float, node: str | None = None) -> ActorHandle:
        where: object = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
        # Up to one CPU, Ray itself gives numpy one thread.
        runtime_env = {"env_vars": processes.ONE_THREAD} if self._cpus > 1 else None
        actor = ray.remote(FreerunActor).options(
            num_cpus=cpus, scheduling_strategy=where, max_restarts=0, max_task_retries=0, runtime_env=runtime_env
        )
        return actor.remote(self._setup)
