"""What runs inside a Ray actor: environments and a policy that stay warm between calls. Imports no torch."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from freerun.collectors.ray_vitals import tell
from freerun.collectors.rollout import in_order
from freerun.collectors.worker import make_rollout
from freerun.core import EnvFactory, EnvFailure, Policy, RunSeed, Segment, UserError
from freerun.transport.pulse import Vitals

CALL_SECONDS = 0.02
"""A call hands over whatever has finished in this time, and one unit at least: a call costs Ray about a millisecond,
which would be more than a short episode takes."""


@dataclass(frozen=True)
class ActorSetup:
    """Everything an actor is started with. It lies in the object store once, for all of them."""

    factory_and_policy: bytes
    run_seed: RunSeed
    num_envs: int
    segment_steps: int | None
    num_workers: int
    tell_seconds: float
    """How often it says that it is alive."""
    import_paths: tuple[str, ...]
    """Where the learner finds modules: on this machine, those of the user's own."""


@dataclass(frozen=True)
class Hello:
    """An actor is ready."""

    node: str
    pid: int


@dataclass(frozen=True)
class Played:
    """What a call hands over: finished units by number."""

    segments: dict[int, Segment]
    weights_seconds: float
    """Spent on taking newer weights."""
    seconds: float
    """Spent on the whole call."""


class FreerunActor:
    """Failures are returned, not raised, so that they arrive as they are; Ray's own are raised."""

    def __init__(self, setup: ActorSetup):
        self._setup = setup
        self._vitals = Vitals()
        self._units: deque[int] = deque()  # granted and not begun
        self._num_held = 0  # granted and not handed over
        self._finished: Iterator[tuple[int, Segment]] = iter(())

    def warm(self) -> Exception | None:
        """Import all that it takes to start, which is most of the time that it takes."""
        try:
            self._unpack()
        except Exception as failure:
            return _told(failure)
        return None

    def _unpack(self) -> tuple[EnvFactory, Policy]:
        sys.path.extend(path for path in self._setup.import_paths if path not in sys.path)
        factory, policy = pickle.loads(self._setup.factory_and_policy)
        return factory, policy

    def start(self, first_episode: int, vitals_key: str) -> Hello | Exception:
        try:
            setup = self._setup
            factory, policy = self._unpack()
            tell(vitals_key, self._vitals, setup.tell_seconds)
            self._rollout = make_rollout(factory, policy, setup.run_seed, setup.num_envs)
            self._rollout.vitals = self._vitals
            if setup.segment_steps is not None:
                episodes = itertools.count(first_episode, setup.num_workers)
                self._pieces = self._rollout.segments(setup.segment_steps, in_order(episodes))
        except Exception as failure:
            return _told(failure)
        return Hello(ray.get_runtime_context().get_node_id(), os.getpid())

    def play(self, units: Sequence[int], version: int, weights: Sequence[ray.ObjectRef]) -> Played | Exception:
        """Take these units too, and go on until some of what was granted is finished.

        Weights come as a reference, in a list so that Ray leaves it alone, and only to those who do not have them.
        """
        started = time.perf_counter()
        for reference in weights:
            self._rollout.load(ray.get(reference), version)
        weights_seconds = time.perf_counter() - started
        self._units.extend(units)
        self._num_held += len(units)
        segments: dict[int, Segment] = {}
        try:
            while self._num_held and (not segments or time.perf_counter() - started < CALL_SECONDS):
                finished = next(self._finished, None)
                if finished is None:  # all was played; now there is more
                    self._finished = self._play()
                    continue
                unit, segment = finished
                segments[unit] = segment.copy()  # its arrays are overwritten by the next, and may not be contiguous
                self._num_held -= 1
        except RayError:
            raise
        except Exception as failure:
            told = _told(failure)
            told.begun = self._vitals.episode  # type: ignore[attr-defined]
            return told
        return Played(segments, weights_seconds, time.perf_counter() - started)

    def _play(self) -> Iterator[tuple[int, Segment]]:
        """Units as they finish, until none is left."""
        if self._setup.segment_steps is None:
            for segment in self._rollout.episodes(lambda wait: self._units.popleft() if self._units else None):
                yield int(segment.episode[0, 0]), segment
        else:
            while self._units:
                yield self._units.popleft(), next(self._pieces)

    def close(self) -> None:
        """Simulators may hold more than memory."""
        if hasattr(self, "_rollout"):
            self._rollout.close()


def _told(failure: Exception) -> Exception:
    """As it is, or with its traceback as text."""
    if isinstance(failure, (UserError, EnvFailure)):
        return failure
    text = "".join(traceback.format_exception(failure))
    return EnvFailure(f"a worker failed:\n{text}")
