"""What runs inside a Ray actor: environments and a policy that stay warm between calls. Imports no torch."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from freerun.collecting.ray.ray_heartbeats import send_heartbeats
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.collecting.workers.worker import describe_failure, make_rollout
from freerun.core import EnvFactory, Policy, RunSeed, Segment
from freerun.transport.heartbeats import Heartbeat

CALL_SECONDS = 0.02
"""A call hands over whatever has finished in this time, and one unit at least. A call costs Ray about a millisecond,
which is more than a short episode takes."""


@dataclass(frozen=True)
class ActorSetup:
    """Everything that an actor is started with. It lies in the object store once, for all actors."""

    factory_and_policy: bytes
    run_seed: RunSeed
    num_envs: int
    segment_steps: int | None
    num_workers: int
    heartbeat_seconds: float
    """The time between two of its heartbeats."""
    import_paths: tuple[str, ...]
    """Where the learner finds modules, such as the user's own on this machine."""


@dataclass(frozen=True)
class ActorReady:
    """The reply of an actor that is ready."""

    node: str
    pid: int


@dataclass(frozen=True)
class PlayedUnits:
    """The reply of a call: finished units by number."""

    segments: dict[int, Segment]
    weights_seconds: float
    """The time that it took to fetch newer weights."""
    seconds: float
    """The time of the whole call."""


@dataclass(frozen=True)
class ActorFailed:
    """The reply of an actor that failed. It is returned, not raised, so that Ray hands the failure over as it is."""

    failure: Exception
    last_begun_episode: int | None = None


class FreerunActor:
    """Environments and a policy in a process of Ray. Its own failures are returned; those of Ray itself are raised."""

    def __init__(self, setup: ActorSetup):
        self._setup = setup
        self._heartbeat = Heartbeat()
        self._rollout: Rollout | SingleEnvRollout | None = None
        self._units: deque[int] = deque()  # granted and not begun
        self._num_held = 0  # units that were granted and not handed over
        self._finished: Iterator[tuple[int, Segment]] = iter(())

    def warm(self) -> ActorFailed | None:
        """Import everything that a start needs, which takes most of its time."""
        try:
            self._unpack()
        except Exception as failure:
            return ActorFailed(describe_failure(failure))
        return None

    def _unpack(self) -> tuple[EnvFactory, Policy]:
        sys.path.extend(path for path in self._setup.import_paths if path not in sys.path)
        factory, policy = pickle.loads(self._setup.factory_and_policy)
        return factory, policy

    def start(self, first_episode: int, heartbeat_key: str) -> ActorReady | ActorFailed:
        try:
            setup = self._setup
            factory, policy = self._unpack()
            send_heartbeats(heartbeat_key, self._heartbeat, setup.heartbeat_seconds)
            self._rollout = make_rollout(factory, policy, setup.run_seed, setup.num_envs)
            self._rollout.heartbeat = self._heartbeat
            if setup.segment_steps:
                episodes = itertools.count(first_episode, setup.num_workers)
                self._segments = self._rollout.segments(setup.segment_steps, next_from(episodes))
        except Exception as failure:
            return ActorFailed(describe_failure(failure))
        return ActorReady(ray.get_runtime_context().get_node_id(), os.getpid())

    def play(self, units: Sequence[int], version: int, weights: Sequence[ray.ObjectRef]) -> PlayedUnits | ActorFailed:
        """Take these units too, and go on until some of what was granted is finished.

        Weights come as a reference, and only to actors that do not have them. The reference lies in a list, because Ray
        would fetch a bare one before the call.
        """
        started = time.perf_counter()
        rollout = self._require_rollout()
        for reference in weights:
            rollout.load(ray.get(reference), version)
        weights_seconds = time.perf_counter() - started
        self._units.extend(units)
        self._num_held += len(units)
        segments: dict[int, Segment] = {}
        try:
            while self._num_held and (not segments or time.perf_counter() - started < CALL_SECONDS):
                finished = next(self._finished, None)
                if finished is None:  # all earlier units were played; now there are more
                    self._finished = self._play()
                    continue
                unit, segment = finished
                segments[unit] = segment.copy()  # its arrays are overwritten by the next, and may not be contiguous
                self._num_held -= 1
        except RayError:
            raise
        except Exception as failure:
            return ActorFailed(describe_failure(failure), self._heartbeat.episode)
        return PlayedUnits(segments, weights_seconds, time.perf_counter() - started)

    def _play(self) -> Iterator[tuple[int, Segment]]:
        """Yield units as they finish, until none is left."""
        if not self._setup.segment_steps:
            rollout = self._require_rollout()
            for segment in rollout.episodes(lambda wait: self._units.popleft() if self._units else None):
                yield int(segment.episode[0, 0]), segment
        else:
            while self._units:
                yield self._units.popleft(), next(self._segments)

    def close(self) -> None:
        """Close the environments, because simulators may hold more than memory."""
        if self._rollout is not None:
            self._rollout.close()

    def _require_rollout(self) -> Rollout | SingleEnvRollout:
        assert self._rollout is not None, "an actor is started before it plays"
        return self._rollout
