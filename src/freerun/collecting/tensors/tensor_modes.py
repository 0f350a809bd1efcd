"""The modes for environments that are tensors on a device.

A simulator such as Isaac Sim may be stepped only by the thread that made it: from another thread it deadlocks. So the
simulator keeps the main thread, and in the modes that collect while the learner updates, the learner moves to a thread
and a CUDA stream of its own (`run_with_learner`). Segments stay on the device from the step to the gradient.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from freerun.collecting.scheduling.importance_queue import ImportanceQueue
from freerun.collecting.scheduling.scheduler import queue_size_tunable
from freerun.collecting.scheduling.segment_rounds import refuse_episodes
from freerun.collecting.scheduling.units import SKIP_EPISODES
from freerun.collecting.tensors.checked_rollout import CheckedRollout, count_rejected
from freerun.collecting.tensors.segment_history import SegmentHistory
from freerun.collecting.tensors.simulator_evaluation import EvaluationRequest
from freerun.collecting.tensors.simulator_watch import SimulatorWatch
from freerun.collecting.tensors.tensor_drops import TensorDrops
from freerun.collecting.tensors.tensor_rollout import keep_for_current_stream, make_rollouts
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    FloatArray,
    Metrics,
    Policy,
    RunSeed,
    SharedSeed,
    State,
    TensorEnv,
    TensorSegment,
    Tunable,
    UserError,
)
from freerun.transport.signals import interrupt

JOIN_SECONDS = 1.0
"""After Ctrl-C the learner may finish an update that takes no longer than this; then it is interrupted."""


class TensorConfig(Protocol):
    @property
    def num_steps_per_env(self) -> int | None: ...


class QueueConfig(TensorConfig, Protocol):
    @property
    def max_queue_size(self) -> int: ...


@runtime_checkable
class RemoteSimulator(Protocol):
    """An environment that says whether its steps are made in another process, so that any thread may wait for them."""

    is_elsewhere: bool


class SimulatorLog:
    """A gauge: what the simulators log about themselves, for the record of an update."""

    def __init__(self, envs: Sequence[TensorEnv]):
        self._envs = envs

    def read(self, step: int) -> Metrics:
        return {name: value for env in self._envs for name, value in env.metrics().items()}

    def close(self) -> None:
        """The collector closes the environments."""


class TensorCollector:
    """What the three modes share: the rollouts, the watch over them, and the counts of what became of each segment."""

    def __init__(self, envs: Sequence[TensorEnv], policy: Policy, settings: CollectorSettings, config: TensorConfig):
        if settings.deterministic:
            raise UserError(
                f"--deterministic compares whole episodes, which --mode {settings.mode} hands over in pieces where the "
                "environment is tensors: leave it out (the same --seed gives the same simulation all the same)"
            )
        num_steps = config.num_steps_per_env
        assert num_steps is not None
        self._mode = settings.mode
        self.num_workers = len(envs)
        self._tracks = settings.tracks
        self.simulator_log = SimulatorLog(envs)
        rollouts = make_rollouts(envs, policy, _first_seed(settings.seed, len(envs)), num_steps, settings.acceleration)
        self._steps_per_segment = num_steps * envs[0].num_envs
        num_envs = sum(env.num_envs for env in envs)
        before = settings.start.counts
        self._counts = replace(before, episodes_started=before.episodes_started + num_envs, episodes_in_flight=num_envs)
        self._history = SegmentHistory(len(envs))
        self._drops = TensorDrops([env.num_envs for env in envs], before)
        # Guards the counts and, in the modes with a queue, all that the learner's and the simulator's threads share.
        self._changed = threading.Condition()
        restart_policy = RestartPolicy(settings, SKIP_EPISODES)
        self.simulator_watch = SimulatorWatch(settings.step_timeout, restart_policy)
        self._rollouts = [
            CheckedRollout(rollout, worker, restart_policy, self.simulator_watch, self._reject)
            for worker, rollout in enumerate(rollouts)
        ]

    def _reject(self, segment: TensorSegment) -> None:
        with self._changed:
            self._history.note(segment)
            count_rejected(self._counts, segment)
            self._drops.note_rejected(segment)

    def counts(self) -> Counts:
        with self._changed:
            dropped = self._drops.statistics
            return replace(
                self._counts,
                steps_dropped=dropped.steps,
                steps_dropped_by_worker=dict(dropped.by_worker),
                steps_dropped_by_length=dict(dropped.by_length),
                drop_bias=dropped.bias,
            )

    def evaluate(self, policy: Policy, num_episodes: int) -> list[float]:
        """Play new episodes on the first simulator, and return their returns. Training then begins new ones, too."""
        rollout = self._rollouts[0]
        returns = rollout.evaluate(policy, num_episodes)
        with self._changed:
            self._counts.episodes_started += rollout.env.num_envs
            self._counts.episodes_dropped += rollout.env.num_envs
            self._drops.note_new_episodes(0, rollout.num_segments)
        return returns

    def _num_segments(self, demand: Demand) -> int:
        refuse_episodes(demand, self._mode)
        return math.ceil(demand.steps / self._steps_per_segment)

    def _hand_over(self, segment: TensorSegment) -> TensorSegment:
        """Count a segment as delivered. The learner's thread calls this, on the learner's stream."""
        keep_for_current_stream(segment)
        num_ended = int(segment.ended.sum())
        with self._changed:
            self._counts.episodes_started += num_ended  # where one ends, the next begins
            self._counts.episodes_delivered += num_ended
            self._counts.steps_delivered += segment.num_steps
            self._counts.busy_seconds += segment.seconds
            return self._history.tell(segment)

    def close(self) -> None:
        self.simulator_watch.close()
        for rollout in self._rollouts:
            rollout.env.close()


class TensorSync(TensorCollector):
    """Collects and learns in turns, on one thread."""

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
        self._tracks.set_state(0, State.BUSY)
        segments = []
        for _ in range(self._num_segments(demand)):
            segment = self._rollouts[0].collect()
            self._history.note(segment)
            segments.append(self._hand_over(segment))
        self._tracks.set_state(0, State.WAITING_FOR_WEIGHTS)
        return segments


class TensorBatch(TensorCollector):
    """Collects while the learner updates, as far ahead as the lag allows and the queue has space; then it waits.

    All attributes below are guarded by `_changed`, whose waiters are woken after every change.
    """

    def __init__(self, envs: Sequence[TensorEnv], policy: Policy, settings: CollectorSettings, config: QueueConfig):
        super().__init__(envs, policy, settings, config)
        self._max_lag = settings.max_lag
        self._queue_size = config.max_queue_size
        self._bounds = settings.tuning_bounds
        self._queue: ImportanceQueue[TensorSegment] = ImportanceQueue()
        # Segments since the start: begun by the simulators, taken by the learner, and allowed to begin.
        self._num_begun = self._num_taken = self._num_granted = 0
        self._num_in_progress = 0
        self._newest_weights: tuple[FloatArray, int] | None = None
        self._evaluation: EvaluationRequest | None = None
        self._ended = False
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------------------------------ the learner's thread

    def publish(self, weights: FloatArray, version: int) -> None:
        with self._changed:
            self._newest_weights = (weights.copy(), version)
            self._changed.notify_all()

    def collect(self, demand: Demand) -> list[TensorSegment]:
        num_wanted = self._num_segments(demand)
        num_next = num_wanted if demand.next_steps is None else math.ceil(demand.next_steps / self._steps_per_segment)
        with self._changed:
            # The lag budget: beyond this demand, at most `max_lag` further updates may be collected ahead.
            num_ahead = self._queue_size if self._max_lag is None else num_next * self._max_lag
            if demand.steps_left is not None:  # the run has no steps left for more
                num_ahead = min(num_ahead, math.ceil(demand.steps_left / self._steps_per_segment) - num_wanted)
            self._num_granted = max(self._num_granted, self._num_taken + num_wanted + num_ahead)
            self._changed.notify_all()
            # If the demand is larger than the queue, the training loop asks again for the rest.
            self._changed.wait_for(lambda: len(self._queue) >= self._num_now(num_wanted) or self._ended)
            num_now = self._num_now(num_wanted) if num_wanted else len(self._queue)
            if len(self._queue) < num_now:
                raise RuntimeError("the simulator has ended") from self._failure
            taken = sorted((self._queue.take_first() for _ in range(num_now)), key=lambda arrival: arrival.number)
            self._num_taken += num_now
            self._changed.notify_all()
        # In the order of arrival, so that the segments of a simulator follow each other.
        return [self._hand_over(arrival.item) for arrival in taken]

    def _num_now(self, num_wanted: int) -> int:
        """How many segments the learner waits for. --adapt may change the queue meanwhile."""
        return min(num_wanted, self._queue_size)

    def evaluate(self, policy: Policy, num_episodes: int) -> list[float]:
        """Have the simulator's thread do it between two segments, and wait for the answer."""
        request = EvaluationRequest(policy, num_episodes)
        with self._changed:
            self._evaluation = request
            self._changed.notify_all()
            self._changed.wait_for(lambda: request.returns is not None or self._ended)
            if request.returns is None:
                raise RuntimeError("the simulator has ended") from self._failure
        return request.returns

    def counts(self) -> Counts:
        return replace(super().counts(), queue_fill=len(self._queue) / self._queue_size)

    def tunables(self) -> list[Tunable]:
        """What --adapt may change: the length of the queue."""
        return [queue_size_tunable(lambda: self._queue_size, self._resize_queue, self._bounds)]

    def _resize_queue(self, queue_size: int) -> None:
        with self._changed:
            self._queue_size = queue_size
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ the simulator's thread

    def run_with_learner(self, learn: Callable[[], None]) -> None:
        """Collect on this thread until `learn`, on a thread and a CUDA stream of its own, has ended.

        A simulator in another process is waited for by a thread of its own, so that no simulator waits for another.
        """
        workers = range(self.num_workers)
        elsewhere = [worker for worker in workers if _is_elsewhere(self._rollouts[worker].env)]
        here = [worker for worker in workers if worker not in elsewhere]
        learner = threading.Thread(target=self._learn, args=(learn,), name="freerun-learner")
        threads = [learner, *(threading.Thread(target=self._collect_elsewhere, args=(worker,)) for worker in elsewhere)]
        for thread in threads:
            thread.start()
        try:
            if here:
                self._collect_until_end(here)
        except BaseException as failure:
            self._end(failure)
            if isinstance(failure, KeyboardInterrupt):
                # Ctrl-C reaches only this thread, and the learner may be in the middle of a long update.
                learner.join(JOIN_SECONDS)
                if learner.is_alive():
                    interrupt(learner)
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _learn(self, learn: Callable[[], None]) -> None:
        """The learner's thread."""
        device = self._rollouts[0].env.device
        stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if device.type == "cuda":
            # What was made on the default stream must be complete before the learner's own stream uses it.
            torch.cuda.synchronize(device)
            stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        try:
            with stream:
                learn()
            self._end(None)
        except BaseException as failure:  # `run_with_learner` raises it again
            self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._ended = True
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _collect_elsewhere(self, worker: int) -> None:
        """The thread that waits for a simulator in another process."""
        try:
            self._collect_until_end([worker])
        except BaseException as failure:  # `run_with_learner` raises it again
            self._end(failure)

    def _collect_until_end(self, workers: Sequence[int]) -> None:
        """Collect one segment of each of these simulators in turn, until the learner has ended."""
        while self._begin(workers):
            assert self._newest_weights is not None
            newest_weights = self._newest_weights  # one read: all of this turn use the same version
            for worker in workers:
                rollout = self._rollouts[worker]
                self._tracks.set_state(worker, State.BUSY)
                rollout.load(*newest_weights)
                self._put(rollout.collect())
                # It waits for space in the queue or, if there are several, for the others of this thread.
                self._tracks.set_state(worker, State.WAITING_FOR_SLOT)

    def _begin(self, workers: Sequence[int]) -> bool:
        """Wait until the next segments may begin; False when the learner has ended."""
        while True:
            with self._changed:
                self._wait_until_allowed(len(workers), 0 in workers)
                request = self._evaluation if 0 in workers and not self._ended else None
                if request is None:
                    self._num_begun += len(workers)
                    self._num_in_progress += len(workers)
                    return not self._ended
            returns = super().evaluate(request.policy, request.num_episodes)
            with self._changed:
                request.returns, self._evaluation = returns, None
                self._changed.notify_all()

    def _wait_until_allowed(self, num_segments: int, evaluates: bool) -> None:
        """Wait for a grant and for space in the queue, or for an evaluation that this thread is asked for."""

        def is_allowed() -> bool:
            # Segments in progress have their place already. A turn of more simulators than the queue has places must
            # still be able to begin, hence the maximum.
            num_filled = len(self._queue) + self._num_in_progress + num_segments
            return self._num_begun < self._num_granted and num_filled <= max(self._queue_size, num_segments)

        self._changed.wait_for(lambda: self._ended or is_allowed() or (evaluates and self._evaluation is not None))

    def _put(self, segment: TensorSegment) -> None:
        importance = self._importance(segment)
        with self._changed:
            self._history.note(segment)
            self._queue.add(self._queue.next_number(), segment, importance)
            self._num_in_progress -= 1
            self._changed.notify_all()

    def _importance(self, segment: TensorSegment) -> float:
        """Equal for all: the oldest comes first."""
        return 0.0


def _first_seed(seed: RunSeed, num_simulators: int) -> int:
    """The seed by which the first simulator's actions are drawn; the next ones follow, and those of other learners."""
    if isinstance(seed, SharedSeed):
        return seed.run_seed + seed.learner * num_simulators
    assert isinstance(seed, int)
    return seed


def _is_elsewhere(env: TensorEnv) -> bool:
    return isinstance(env, RemoteSimulator) and env.is_elsewhere
