"""`--learner-threads auto`: the learner computes on cores that the workers leave idle, and gives them back."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

from freerun.core import Algorithm, Metrics
from freerun.run.run_parts import RunParts
from freerun.settings.config import AnyConfig
from freerun.settings.factories import computed_by, has_open_threads, most_learner_threads, set_learner_threads
from freerun.transport.processes import usable_cores

METRIC = "learner_threads"
"""How many threads computed an update. A replay sets the same number: sums in floating point depend on it."""
MEASURE_SECONDS = 1.0
"""The load of a shorter time says little."""
BUSY_SHARE = 0.5
"""A learner that updates for less of the time is not what the others wait for, so it gets no more threads."""
WORTH = 0.9
"""More threads are kept if an update of as many steps takes at most this share of the time that fewer took."""
STEADY = 1.25
"""More threads are tried only if two measurements of a step's cost differ by less than this factor. Otherwise the work
itself changes, as after the first random steps, and nothing can be compared."""
RETRY_SECONDS = 60.0
"""Threads that did not pay are tried again after this time: another part of the training may need them."""


MachineLoad = Callable[[int], Metrics]
"""Returns the load by the name of its metric."""


def make_learner_threads(parts: RunParts, machine_load: MachineLoad) -> LearnerThreads | None:
    """Return what changes the number of threads while a run goes on; None where nothing may."""
    config, algorithm = parts.config, parts.algorithm
    if not has_open_threads(config, algorithm):
        return None
    set_threads = functools.partial(set_learner_threads, config, algorithm)
    num_cores = len(usable_cores())
    threads = LearnerThreads(machine_load, set_threads, num_cores, most_learner_threads(config, algorithm, num_cores))
    threads.begin_with(first_threads(config, algorithm, parts.collector.num_workers, num_cores))
    return threads


def first_threads(config: AnyConfig, algorithm: Algorithm, num_workers: int, num_cores: int) -> int:
    """Return how many threads the learner has in the first updates of a run."""
    if isinstance(config.learner_threads, int):
        return config.learner_threads
    is_kernel = has_open_threads(config, algorithm) and computed_by(config, algorithm) == "kernel"
    if not is_kernel or config.num_learners > 1:
        return 1
    # The kernel's threads change no result and wait asleep, so they need not prove their worth first: they begin on the
    # cores that are left when each worker has one, and one is for the rest of this process.
    return max(1, min(most_learner_threads(config, algorithm, num_cores), num_cores - 1 - num_workers))


class LearnerThreads:
    """A sink that sets the number of threads between two updates, and a gauge that reports it.

    Twice as many threads are tried where cores are idle, and kept if they make updates faster.
    """

    def __init__(
        self,
        machine_load: MachineLoad,
        set_threads: Callable[[int], None],
        num_cores: int,
        most_threads: int,
        clocks: Callable[[], tuple[float, float]] = lambda: (time.perf_counter(), time.process_time()),
    ):
        """`most_threads` can be of use; `clocks` are wall and processor seconds."""
        self._machine_load = machine_load
        self._set_threads = set_threads
        self._num_cores, self._most_threads = num_cores, most_threads
        self._clocks = clocks
        self._last = clocks()
        self._last_step = 0
        self._updating_seconds = self._seconds_per_step = 0.0
        self._fewer: tuple[int, float] | None = None  # the threads before the last increase, and what a step cost then
        self._most, self._most_until = most_threads, 0.0  # more threads have not paid, which counts until this time
        self.num_threads = 1

    def begin_with(self, num_threads: int) -> None:
        """Have more than one thread from the first update on."""
        if num_threads > 1:
            self.num_threads = num_threads
            self._set_threads(num_threads)

    def read(self, step: int) -> Metrics:
        return {METRIC: float(self.num_threads)}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._updating_seconds += metrics["learner_updating_share"] * metrics["interval_seconds"]
        now = self._clocks()
        wall, processor = (later - before for later, before in zip(now, self._last, strict=True))
        load = self._machine_load(step).get("cpu_percent")
        if load is None or wall < MEASURE_SECONDS:
            return
        earlier, seconds_per_step = self._seconds_per_step, self._updating_seconds / max(1, step - self._last_step)
        is_steady = earlier / STEADY <= seconds_per_step <= earlier * STEADY
        is_bottleneck = self._updating_seconds >= BUSY_SHARE * wall
        self._seconds_per_step = seconds_per_step
        self._last, self._last_step, self._updating_seconds = now, step, 0.0
        fewer, self._fewer = self._fewer, None
        if fewer is not None and seconds_per_step > WORTH * fewer[1]:
            self._most, self._most_until = fewer[0], now[0] + RETRY_SECONDS
        if now[0] >= self._most_until:
            self._most = self._most_threads
        # What this process used is its own to use again; what nobody used is free. Rounded to the nearest number: a
        # core is never idle to the last per cent.
        free = round(processor / wall + self._num_cores * (1 - load / 100))
        wanted = max(1, min(free, self._most, 2 * self.num_threads))
        if wanted > self.num_threads and not (is_bottleneck and is_steady):
            return
        if wanted > self.num_threads:
            self._fewer = self.num_threads, seconds_per_step
        if wanted != self.num_threads:
            self.num_threads = wanted
            self._set_threads(wanted)

    def close(self) -> None:
        """This sink holds nothing open."""
