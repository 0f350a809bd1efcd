"""Measures environments that are tensors: steps with the policy, updates, and both at the same time.

They are built in this process, because a simulator may need its main thread and the whole device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from freerun.adapters.tensor_envs import GIVEN, TensorEnvs
from freerun.collecting.tensors.tensor_rollout import TensorRollout
from freerun.core import Acceleration, Algorithm, TensorSegment, background_stages
from freerun.settings.config import AnyConfig
from freerun.settings.factories import make_algorithm, make_tensors
from freerun.settings.registry import find_algorithm, find_mode
from freerun.tools.probe.candidates import TENSOR_FACTORS, Candidate, Search
from freerun.tools.probe.measurement import TensorMeasurement, TensorVector, UpdateCost
from freerun.tools.probe.update_costs import learner_of, minibatch_of, steps_per_update

COLLECT_SECONDS = 0.5
"""How long each vector is stepped."""
LEARN_SECONDS = 1.0
"""How long each learner updates, besides its first update."""
OVERLAP_SECONDS = 1.5
"""How long collecting and learning are measured at the same time."""
LONGEST_SEGMENT_SECONDS = 2.0
"""Larger vectors are not measured once a segment takes longer than this."""
LONGEST_UPDATE_SECONDS = 3.0
"""An update that is expected to take longer than this is extrapolated from smaller ones."""
STILL_PAYS = 0.9
"""Larger vectors are measured as long as each takes at most this share of the time per step of the one before."""


def measure_tensors(search: Search, say: Callable[[str], None]) -> TensorMeasurement:
    """Measure vectors of all sizes that are candidates, from the smallest on, as long as larger ones pay."""
    started = time.perf_counter()
    vectors: list[TensorVector] = []
    updates: dict[Any, UpdateCost] = {}
    shares, construct_seconds = (1.0, 1.0), 0.0
    lengths = _EndedEpisodes()
    sizes = search.tensor_sizes()
    for number, num_envs in enumerate(sizes):
        say(f"stepping {num_envs:,} environments")
        try:
            trial = _TensorTrial(search.tensor_candidates(num_envs), lengths)
        except torch.OutOfMemoryError:
            break
        with contextlib.closing(trial):
            fastest = min((vector.seconds_per_step for vector in vectors), default=None)
            vectors += (found := trial.time_vectors())
            say(f"learning from {num_envs:,} environments")
            trial.time_updates(updates)
            if number == 0:
                shares, construct_seconds = trial.time_both(), trial.construct_seconds
        slowest = max(vector.seconds_per_step * vector.num_envs * vector.segment_steps for vector in found)
        if slowest > LONGEST_SEGMENT_SECONDS:
            break
        if fastest is not None and min(vector.seconds_per_step for vector in found) > STILL_PAYS * fastest:
            break
    largest = sizes[-1] if sizes else 0
    is_bounded = bool(vectors) and vectors[-1].num_envs == largest and _has_bound(search, largest)
    took = time.perf_counter() - started
    return TensorMeasurement(
        tuple(vectors), tuple(updates.values()), *shares, lengths.mean, construct_seconds, is_bounded, took
    )


def _has_bound(search: Search, largest: int) -> bool:
    """True if more environments would leave a run too few updates."""
    is_open = any("num_envs" in search.open_settings(mode) for mode in search.configs)
    usual = min(config.collector.num_envs for config in search.completed().values())
    return is_open and largest < usual * max(TENSOR_FACTORS)


class _EndedEpisodes:
    """Adds up the lengths of the episodes that have ended."""

    def __init__(self) -> None:
        self._sum = self._count = 0

    def note(self, segment: TensorSegment) -> None:
        ended = segment.ended
        self._sum += int(segment.episode_length[ended].sum())
        self._count += int(ended.sum())

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None


class _TensorTrial:
    """Environments of one size, and the candidates that have this size."""

    def __init__(self, candidates: Sequence[Candidate], lengths: _EndedEpisodes):
        self._candidates = candidates
        self._lengths = lengths
        config = candidates[0].config
        begun = time.perf_counter()
        self._envs: TensorEnvs = make_tensors(config, config.collector.num_envs, 1, config.seed)
        self.construct_seconds = time.perf_counter() - begun
        self._is_given = str(config.env).startswith(GIVEN)
        self._cuda = self._envs.envs[0].device.type == "cuda"

    def _rollout(self, config: AnyConfig, algorithm: Algorithm) -> TensorRollout:
        env = self._envs.envs[0]
        acceleration: Acceleration = "auto"
        if find_algorithm(config.algo).traits.has_acceleration:
            acceleration = config.algorithm.acceleration
        actor = algorithm.policy.on(env.device, config.seed)
        rollout = TensorRollout(env, actor, config.collector.num_steps_per_env, acceleration)
        rollout.load(algorithm.policy.weights, 0)
        rollout.collect()  # the first segment allocates memory, and may be recorded as a graph
        return rollout

    def time_vectors(self) -> list[TensorVector]:
        """Time segments of every length that one of the modes hands over."""
        by_length = {candidate.config.collector.num_steps_per_env: candidate.config for candidate in self._candidates}
        found = []
        for segment_steps, config in by_length.items():
            rollout = self._rollout(config, make_algorithm(config, self._envs))

            def collect(rollout: TensorRollout = rollout) -> None:
                self._lengths.note(rollout.collect())

            seconds = _mean_seconds(collect, COLLECT_SECONDS)
            num_envs = config.collector.num_envs
            found.append(TensorVector(num_envs, segment_steps, seconds / (segment_steps * num_envs)))
        return found

    def time_updates(self, updates: dict[Any, UpdateCost]) -> None:
        """Time an update for each set of algorithm settings, unless it would take too long."""
        for candidate in self._candidates:
            config = candidate.config
            per_step = max((update.seconds_per_step for update in updates.values()), default=0.0)
            expected = per_step * (steps_per_update(config) or 0)
            if config.algorithm in updates or expected > LONGEST_UPDATE_SECONDS:
                continue
            learner = _TensorLearner(config, make_algorithm(config, self._envs), self._cuda)
            learner.gather(self._rollout(config, learner.algorithm))
            learner.update()  # the first one allocates memory and may be recorded as a graph
            seconds = _mean_seconds(learner.update, LEARN_SECONDS)
            updates[config.algorithm] = learner.cost(seconds)
            learner.finish()

    def time_both(self) -> tuple[float, float]:
        """Return the speeds of collecting and of learning while both go on, as shares of their speeds alone.

        As in a run, the simulator keeps this thread and the learner has a thread and a CUDA stream of its own.
        """
        able = [found for found in self._candidates if not find_mode(found.mode).traits.takes_turns]
        if not able:
            return 1.0, 1.0
        config = able[0].config
        learner = _TensorLearner(config, make_algorithm(config, self._envs), self._cuda)
        rollout = self._rollout(config, learner.algorithm)
        learner.gather(rollout)
        device = self._envs.envs[0].device
        ready, collecting = threading.Event(), threading.Event()
        seconds_alone, seconds_both = [0.0], [0.0]
        failures: list[BaseException] = []

        def learn() -> None:
            try:
                stream = torch.cuda.stream(torch.cuda.Stream(device)) if self._cuda else contextlib.nullcontext()  # type: ignore[no-untyped-call]
                with stream:
                    learner.update()
                    seconds_alone[0] = _mean_seconds(learner.update, OVERLAP_SECONDS / 2)
                    ready.set()
                    collecting.wait()
                    seconds_both[0] = _mean_seconds(learner.update, OVERLAP_SECONDS)
            except BaseException as failure:
                failures.append(failure)
            finally:
                ready.set()

        thread = threading.Thread(target=learn, name="freerun-probe-learner")
        thread.start()
        ready.wait()
        collect_alone = _mean_seconds(rollout.collect, OVERLAP_SECONDS / 2)
        collecting.set()
        begun, num_segments = time.perf_counter(), 0
        while thread.is_alive():
            rollout.collect()
            num_segments += 1
        collect_both = (time.perf_counter() - begun) / max(1, num_segments)
        thread.join()
        learner.finish()
        if failures:
            raise failures[0]
        return min(1.0, collect_alone / collect_both), min(1.0, seconds_alone[0] / seconds_both[0])

    def close(self) -> None:
        if not self._is_given:  # what a Python caller has made, the run still needs
            self._envs.envs[0].close()
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()


class _TensorLearner:
    """An algorithm that learns again and again from the same segments."""

    def __init__(self, config: AnyConfig, algorithm: Algorithm, is_cuda: bool):
        self._config = config
        self.algorithm = algorithm
        self._is_cuda = is_cuda
        self._segments: list[TensorSegment] = []
        self._demand = algorithm.demand()
        self._version = 0

    def gather(self, rollout: TensorRollout) -> None:
        """Collect what one update asks for after the first. (The first may ask for more: see --learning-starts.)"""
        while self.algorithm.demand():
            self.algorithm.observe([rollout.collect()])
        self.algorithm.update(0, 0.0)
        self._demand = self.algorithm.demand()
        steps, num_steps = max(1, self._demand.steps), 0
        while num_steps < steps:
            self._segments.append(rollout.collect())
            num_steps += self._segments[-1].num_steps

    def update(self) -> None:
        self.algorithm.observe(self._segments)
        self._version += 1
        self.algorithm.update(self._version, 0.0)
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()

    def cost(self, seconds: float) -> UpdateCost:
        sizes = (minibatch_of(self._config), steps_per_update(self._config), learner_of(self._config))
        num_steps = sum(segment.num_steps for segment in self._segments)
        return UpdateCost(dataclasses.asdict(self._demand), num_steps, seconds, *sizes)

    def finish(self) -> None:
        """Wait for stages that still run."""
        for stage in background_stages(self.algorithm).values():
            if stage.is_busy:
                stage.finish()


def _mean_seconds(call: Callable[[], object], seconds: float) -> float:
    """Call for about this long, at least twice; return the mean time of a call."""
    begun, num_calls = time.perf_counter(), 0
    while num_calls < 2 or time.perf_counter() - begun < seconds:
        call()
        num_calls += 1
    return (time.perf_counter() - begun) / num_calls
