"""Workers that stay warm between many trainings, for sweeps and searches."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from freerun.run.pool import Pool

MOST_POOLS = 4
"""The most pools that are kept. Trainings that differ in the seed or in the environment need different ones."""


class WarmPools:
    """The pools that were used last, each for the trainings that can share its workers."""

    def __init__(self) -> None:
        self._pools: OrderedDict[Hashable, Pool] = OrderedDict()
        # A pool shortens it while it is open, and restores what it has found: another pool's, if there were several.
        self._switch_interval = sys.getswitchinterval()

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], Pool]) -> Iterator[Pool]:
        """Lend the pool of a key for one training; a new one if there is none."""
        if key in self._pools:
            pool = self._pools.pop(key)
        else:
            # Room is made first, so that there are never more workers than those of the pools that are kept.
            while len(self._pools) >= MOST_POOLS:
                self._pools.popitem(last=False)[1].close()
            pool = make()
        try:
            yield pool
        except BaseException:
            pool.close()  # nobody knows what a training that failed has left behind
            raise
        self._pools[key] = pool  # at the end: the one that was used last

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        sys.setswitchinterval(self._switch_interval)
