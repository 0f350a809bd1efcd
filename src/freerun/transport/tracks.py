"""Who does what, when: a row of shared memory per worker, learner and stage, written by whoever it tells of.

A change of state costs its writer under a microsecond and sends no message. Spans shorter than `RESOLUTION_SECONDS` are
added up into one block, so that a row holds seconds of history whatever its writer does; no second of it is lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from typing import NamedTuple

from freerun.core import State

RESOLUTION_SECONDS = 0.01
NUM_STATES = len(State)
# A row, in float64: how many blocks were written, the state and since when, the block being added up, totals, the ring.
COUNT, STATE, SINCE, BLOCK, TOTALS = 0, 1, 2, 3, 3 + 1 + NUM_STATES
RING = TOTALS + NUM_STATES
BLOCK_SIZE = 1 + NUM_STATES
RING_BLOCKS = 512
"""Five seconds of the shortest blocks."""
ROW = RING + RING_BLOCKS * BLOCK_SIZE
UNKNOWN = -1.0
LONG_SPAN_SECONDS = 1.0
"""A span that has not ended is told in pieces once it is this long."""


class Block(NamedTuple):
    """Seconds of one track, by state. Its parts are in no order: only a block of one state is a span."""

    track: int
    start: float
    seconds: tuple[float, ...]

    @property
    def stop(self) -> float:
        return self.start + sum(self.seconds)


class Tracks:
    """Rows that any process may write, one writer at a time each; read by the learner's process alone."""

    def __init__(self, context: ForkServerContext, names: Sequence[str]):
        self.names = list(names)
        self._array = context.RawArray("d", len(names) * ROW)
        self._map()
        for track in range(len(names)):
            self._memory[track * ROW + STATE] = UNKNOWN

    @property
    def workers(self) -> list[str]:
        """Those that come before the learner."""
        return self.names[: self.names.index("learner")]

    def _map(self) -> None:
        self._memory = memoryview(self._array).cast("B").cast("d")
        self._nothing = memoryview(bytes(8 * NUM_STATES)).cast("d")

    def __getstate__(self) -> dict[str, object]:
        return {"names": self.names, "_array": self._array}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    def enter(self, track: int, state: State, at: float | None = None) -> None:
        """The last state ends and this one begins: now, or at a moment that another machine has told."""
        memory, row = self._memory, track * ROW
        now = time.perf_counter() if at is None else max(at, memory[row + SINCE])
        last = int(memory[row + STATE])
        if last == UNKNOWN:
            memory[row + BLOCK] = now
        else:
            seconds = now - memory[row + SINCE]
            if seconds >= RESOLUTION_SECONDS and memory[row + SINCE] - memory[row + BLOCK] > RESOLUTION_SECONDS / 10:
                self._push(row, memory[row + SINCE])  # a span that can stand alone does
            memory[row + BLOCK + 1 + last] += seconds
            memory[row + TOTALS + last] += seconds
            if now - memory[row + BLOCK] >= RESOLUTION_SECONDS:
                self._push(row, now)
        memory[row + STATE] = state
        memory[row + SINCE] = now

    def _push(self, row: int, now: float) -> None:
        """The block is complete: it goes into the ring, then the count says so, and the next begins."""
        memory, block = self._memory, row + BLOCK
        place = row + RING + int(memory[row + COUNT]) % RING_BLOCKS * BLOCK_SIZE
        memory[place : place + BLOCK_SIZE] = memory[block : block + BLOCK_SIZE]
        memory[row + COUNT] += 1
        memory[block] = now
        memory[block + 1 : block + BLOCK_SIZE] = self._nothing

    def totals(self, track: int) -> list[float]:
        """Seconds in each state so far, the current one's included; all 0 for a track that nobody has written."""
        memory, row = self._memory, track * ROW
        totals = list(memory[row + TOTALS : row + TOTALS + NUM_STATES])
        if memory[row + STATE] != UNKNOWN:
            totals[int(memory[row + STATE])] += max(0.0, time.perf_counter() - memory[row + SINCE])
        return totals

    # ------------------------------------------------------------------------------------------ for the reader

    def num_blocks(self, track: int) -> int:
        return int(self._memory[track * ROW + COUNT])

    def blocks(self, track: int, first: int, count: int) -> list[Block]:
        """From the `first` on, of so many; those that were overwritten meanwhile are missing."""
        memory, row = self._memory, track * ROW
        found = []
        for number in range(max(first, count - RING_BLOCKS + 1), count):
            place = row + RING + number % RING_BLOCKS * BLOCK_SIZE
            start, *seconds = memory[place : place + BLOCK_SIZE]
            found.append(Block(track, start, tuple(seconds)))
        return found

    def current(self, track: int) -> tuple[State, float] | None:
        """The state, and since when."""
        state, since = self._memory[track * ROW + STATE : track * ROW + SINCE + 1]
        return None if state == UNKNOWN else (State(int(state)), since)


class TracksReader:
    """What has happened since the last look, in blocks; from the moment that it is made."""

    def __init__(self, tracks: Tracks):
        self._tracks = tracks
        self._seen = [tracks.num_blocks(track) for track in range(len(tracks.names))]
        self._told_until = [time.perf_counter()] * len(tracks.names)

    def read(self, to_the_end: bool = False) -> list[Block]:
        """Spans that have not ended are told as far as they have come if they are long, or this is the end."""
        found: list[Block] = []
        now = time.perf_counter()
        for track in range(len(self._tracks.names)):
            count = self._tracks.num_blocks(track)
            for block in self._tracks.blocks(track, self._seen[track], count):
                found += self._tell(block)
            self._seen[track] = count  # what is written from here on is for the next time
            current = self._tracks.current(track)
            if current is not None and now - max(current[1], self._told_until[track]) > (
                0 if to_the_end else LONG_SPAN_SECONDS
            ):
                state, since = current
                seconds = [0.0] * NUM_STATES
                seconds[state] = now - since
                found += self._tell(Block(track, since, tuple(seconds)))
        return found

    def _tell(self, block: Block) -> list[Block]:
        """Less what was told of it before."""
        told = self._told_until[block.track]
        excess = told - block.start
        if excess <= 0:
            self._told_until[block.track] = block.stop
            return [block]
        if block.stop <= told:
            return []
        # What was told early was the span that had not ended: the longest of the block.
        longest = max(range(NUM_STATES), key=lambda state: block.seconds[state])
        seconds = list(block.seconds)
        seconds[longest] = max(0.0, seconds[longest] - excess)
        self._told_until[block.track] = block.stop
        return [Block(block.track, told, tuple(seconds))]
