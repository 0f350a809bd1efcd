"""`--learner-threads auto`: the learner computes on cores that the workers leave idle, and gives them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from freerun.core import Metrics

MEASURE_SECONDS = 1.0
"""The load of a shorter time says little."""


class LearnerThreads:
    """A sink that sets the number of threads after an update, from the load of the machine since the last time."""

    def __init__(
        self,
        machine_load: Callable[[int], Metrics],
        set_threads: Callable[[int], None],
        num_cores: int,
        clocks: Callable[[], tuple[float, float]] = lambda: (time.perf_counter(), time.process_time()),
    ):
        """`machine_load` returns the load by the name of its metric; `clocks` are wall and processor seconds."""
        self._machine_load = machine_load
        self._set_threads = set_threads
        self._num_cores = num_cores
        self._clocks = clocks
        self._last = clocks()
        self.num_threads = 1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        wall, processor = (now - before for now, before in zip(self._clocks(), self._last, strict=True))
        load = self._machine_load(step).get("cpu_percent")
        if load is None or wall < MEASURE_SECONDS:
            return
        self._last = self._clocks()
        # What this process used is its own to use again; what nobody used is free.
        own, idle = processor / wall, self._num_cores * (1 - load / 100)
        wanted = max(1, min(self._num_cores, int(own + idle)))
        if wanted != self.num_threads:
            self.num_threads = wanted
            self._set_threads(wanted)

    def close(self) -> None:
        """This sink holds nothing open."""
