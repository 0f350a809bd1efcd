"""Modes for environments that are tensors: the simulator keeps the thread that made it, the learner gets another."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch

from freerun.collectors.segments import refuse_episodes
from freerun.collectors.supervision import Supervisor
from freerun.collectors.tensor_guard import Guarded, reject
from freerun.collectors.tensor_rollout import TensorRollout
from freerun.collectors.tensor_watch import SimulatorWatch
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    FloatArray,
    Metrics,
    Policy,
    State,
    TensorEnv,
    TensorSegment,
    UserError,
)

REFRESH_SECONDS = 0.05
"""While the queue is full, its oldest segment is replaced this often, so that what the learner finds is new: more often
would only take the device away from the learner."""


class TensorConfig(Protocol):
    @property
    def num_steps_per_env(self) -> int | None: ...


class QueueConfig(TensorConfig, Protocol):
    @property
    def max_queue_size(self) -> int: ...


class SimulatorLog:
    """What the simulators log of themselves, for the record of an update."""

    def __init__(self, envs: Sequence[TensorEnv]):
        self._envs = envs

    def read(self, step: int) -> Metrics:
        return {name: value for env in self._envs for name, value in env.metrics().items()}

    def close(self) -> None:
        """The environments are the collector's."""


class TensorCollector:
    """What the modes share: rollouts, and the books of what became of each segment."""

    mode: ClassVar[str]

    def __init__(self, envs: Sequence[TensorEnv], policy: Policy, settings: CollectorSettings, config: TensorConfig):
        if settings.deterministic:
            raise UserError(
                f"--deterministic compares whole episodes, which --mode {self.mode} hands over in pieces where the "
                "environment is tensors: leave it out (the same --seed gives the same simulation all the same)"
            )
        num_steps = config.num_steps_per_env
        assert num_steps is not None
        self.num_workers = len(envs)
        self._tracks = settings.tracks
        self.simulator_log = SimulatorLog(envs)
        assert isinstance(settings.seed, int)  # several learners have other environments
        rollouts = [
            TensorRollout(env, policy.on(env.device, settings.seed + place), num_steps, settings.acceleration)
            for place, env in enumerate(envs)
        ]
        self._unit_steps = num_steps * envs[0].num_envs
        num_envs = sum(env.num_envs for env in envs)
        before = settings.start.counts
        self._book = replace(before, episodes_started=before.episodes_started + num_envs, episodes_in_flight=num_envs)
        self._changed = threading.Condition()
        supervisor = Supervisor(settings, tolerant=True)
        self.simulator_watch = SimulatorWatch(settings.step_timeout, supervisor)
        self._rollouts = [
            Guarded(rollout, place, supervisor, self.simulator_watch, self._reject)
            for place, rollout in enumerate(rollouts)
        ]

    def _reject(self, worker: int, segment: TensorSegment) -> None:
        with self._changed:
            reject(self._book, worker, segment)

    def counts(self) -> Counts:
        with self._changed:
            return replace(self._book, steps_dropped_by_worker=dict(self._book.steps_dropped_by_worker))

    def _units(self, demand: Demand) -> int:
        refuse_episodes(demand, self.mode)
        return math.ceil(demand.steps / self._unit_steps)

    def _hand_over(self, segment: TensorSegment) -> TensorSegment:
        """To the learner, on its stream."""
        if segment.reward.is_cuda:
            for value in vars(segment).values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(torch.cuda.current_stream(value.device))
        num_ended = int(segment.ended.sum())
        with self._changed:
            self._book.episodes_started += num_ended  # where one ends, the next begins
            self._book.episodes_delivered += num_ended
            self._book.steps_delivered += segment.num_steps
            self._book.busy_seconds += segment.seconds
        return segment

    def close(self) -> None:
        self.simulator_watch.close()
        for rollout in self._rollouts:
            rollout.env.close()


class TensorSync(TensorCollector):
    """Collect, then learn."""

    mode = "sync"

    def __init__(self, envs: Sequence[TensorEnv], policy: Policy, settings: CollectorSettings, config: TensorConfig):
        if settings.max_lag:
            raise UserError(
                "this mode collects and learns in turns, so --max-lag must be 0: "
                "choose --mode batch to collect while the learner updates"
            )
        super().__init__(envs, policy, settings, config)

    def publish(self, weights: FloatArray, version: int) -> None:
        for rollout in self._rollouts:
            rollout.load(weights, version)

    def collect(self, demand: Demand) -> list[TensorSegment]:
        self._tracks.enter(0, State.BUSY)
        segments = [self._hand_over(self._rollouts[0].collect()) for _ in range(self._units(demand))]
        self._tracks.enter(0, State.WAITING_FOR_WEIGHTS)
        return segments


class TensorBatch(TensorCollector):
    """Collect while the learner learns, as far ahead as the lag allows and there is room in the queue; then wait."""

    mode = "batch"
    drops: ClassVar[bool] = False
    """Never wait: when the queue is full the oldest segment is dropped, and counted."""

    def __init__(self, envs: Sequence[TensorEnv], policy: Policy, settings: CollectorSettings, config: QueueConfig):
        super().__init__(envs, policy, settings, config)
        self._max_lag = settings.max_lag
        self._queue_size = config.max_queue_size
        self._queue: deque[tuple[int, TensorSegment]] = deque()
        self._begun = self._taken = self._granted = self._under_way = 0  # segments
        self._newest: tuple[FloatArray, int] | None = None
        self._ended = False
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------------------------------ the learner's thread

    def publish(self, weights: FloatArray, version: int) -> None:
        with self._changed:
            self._newest = (weights.copy(), version)
            self._changed.notify_all()

    def collect(self, demand: Demand) -> list[TensorSegment]:
        num_units = self._units(demand)
        next_units = num_units if demand.next_steps is None else math.ceil(demand.next_steps / self._unit_steps)
        with self._changed:
            ahead = self._queue_size if self._max_lag is None else next_units * self._max_lag
            self._granted = max(self._granted, self._taken + num_units + ahead)
            self._changed.notify_all()
            # Of more than the queue holds, the loop asks again for the others.
            num_now = min(num_units, self._queue_size) if num_units else len(self._queue)
            self._changed.wait_for(lambda: len(self._queue) >= num_now or self._ended)
            if len(self._queue) < num_now:
                raise RuntimeError("the simulator has ended") from self._failure
            taken = [self._queue.popleft()[1] for _ in range(num_now)]
            self._taken += num_now
            self._changed.notify_all()
        return [self._hand_over(segment) for segment in taken]

    def counts(self) -> Counts:
        return replace(super().counts(), queue_fill=len(self._queue) / self._queue_size)

    # ------------------------------------------------------------------------------------------ the simulator's thread

    def beside(self, learn: Callable[[], None]) -> None:
        """Simulators that are elsewhere are waited for by threads of their own, so that none waits for another."""
        workers = range(self.num_workers)
        elsewhere = [worker for worker in workers if getattr(self._rollouts[worker].env, "is_elsewhere", False)]
        here = [worker for worker in workers if worker not in elsewhere]
        threads = [threading.Thread(target=self._learn, args=(learn,), name="freerun-learner")]
        threads += [threading.Thread(target=self._follow, args=(worker,)) for worker in elsewhere]
        for thread in threads:
            thread.start()
        try:
            if here:
                self._drive(here)
        except BaseException as failure:
            self._end(failure)
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _learn(self, learn: Callable[[], None]) -> None:
        device = self._rollouts[0].env.device
        stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        try:
            with stream:
                learn()
            self._end(None)
        except BaseException as failure:  # raised again by `beside`
            self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._ended = True
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _follow(self, worker: int) -> None:
        try:
            self._drive([worker])
        except BaseException as failure:  # raised again by `beside`
            self._end(failure)

    def _drive(self, workers: Sequence[int]) -> None:
        while self._wait_for_room(len(workers)):
            assert self._newest is not None
            newest = self._newest
            for worker in workers:
                rollout = self._rollouts[worker]
                self._tracks.enter(worker, State.BUSY)
                rollout.load(*newest)
                self._put(worker, rollout.collect())
                # Until there is room again; where there are several, until it is its turn.
                self._tracks.enter(worker, State.WAITING_FOR_SLOT)

    def _wait_for_room(self, num_segments: int) -> bool:
        """Until the next segments may begin; False when the learner has ended."""

        def has_room() -> bool:
            filled = len(self._queue) + self._under_way + num_segments
            return self._begun < self._granted and filled <= max(self._queue_size, num_segments)

        with self._changed:
            if self.drops:
                self._changed.wait_for(lambda: self._newest is not None or self._ended)
                self._changed.wait_for(lambda: len(self._queue) < self._queue_size or self._ended, REFRESH_SECONDS)
            else:
                self._changed.wait_for(lambda: self._ended or has_room())
            self._begun += num_segments
            self._under_way += num_segments
            return not self._ended

    def _put(self, worker: int, segment: TensorSegment) -> None:
        with self._changed:
            if len(self._queue) == self._queue_size:
                self._drop(*self._queue.popleft())
            self._queue.append((worker, segment))
            self._under_way -= 1
            self._changed.notify_all()

    def _drop(self, worker: int, segment: TensorSegment) -> None:
        ended = int(segment.ended.sum())
        self._book.episodes_started += ended
        self._book.episodes_dropped += ended
        self._book.steps_dropped += segment.num_steps
        by_worker = self._book.steps_dropped_by_worker
        by_worker[worker] = by_worker.get(worker, 0) + segment.num_steps


class TensorStream(TensorBatch):
    """Collect without ever waiting for the learner."""

    mode = "continuous"
    drops = True
