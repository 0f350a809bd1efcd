"""What workers note of their time: every second once, across processes, however short its pieces."""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freerun.core import State
from freerun.transport import processes
from freerun.transport.tracks import RESOLUTION_SECONDS, RING_BLOCKS, Block, Tracks, TracksReader


class Clock:
    """`time.perf_counter` as a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr("freerun.transport.tracks.time.perf_counter", lambda: self.now)


def noted(*spans: tuple[State, float]) -> tuple[Tracks, TracksReader]:
    """On track 1 of two; the last state goes on."""
    made = Tracks(processes.context(), ["a", "b"])
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        reader = TracksReader(made)
        for state, seconds in spans:
            made.enter(1, state)
            clock.now += seconds
        made.enter(1, State.BUSY)
    return made, reader


def read(reader: TracksReader, now: float) -> list[Block]:
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch).now = now
        return reader.read()


def of(**seconds: float) -> tuple[float, ...]:
    return tuple(seconds.get(state.name.lower(), 0.0) for state in State)


def test_long_spans_stand_alone() -> None:
    _, reader = noted((State.BUSY, 0.5), (State.WAITING_FOR_SLOT, 0.25), (State.BUSY, 1.0))
    assert read(reader, 1.75) == [
        Block(1, 0.0, of(busy=0.5)),
        Block(1, 0.5, of(waiting_for_slot=0.25)),
        Block(1, 0.75, of(busy=1.0)),
    ]


def test_short_spans_are_added_up() -> None:
    _, reader = noted(*[(State.BUSY, 0.00390625), (State.WAITING_FOR_SLOT, 0.001953125)] * 2)
    assert read(reader, 0.01171875) == [Block(1, 0.0, of(busy=0.0078125, waiting_for_slot=0.00390625))]


def test_a_span_under_way_is_told_in_pieces_once_it_is_long() -> None:
    made, reader = noted((State.WAITING_FOR_SLOT, 0.5))
    assert read(reader, 1.0) == [Block(1, 0.0, of(waiting_for_slot=0.5))]
    assert read(reader, 2.0) == [Block(1, 0.5, of(busy=1.5))]
    assert read(reader, 2.5) == []
    made.enter(1, State.WAITING_FOR_SLOT, at=4.5)
    assert read(reader, 4.5) == [Block(1, 2.0, of(busy=2.5))]


def test_a_reader_that_comes_too_late_misses_the_oldest() -> None:
    num = RING_BLOCKS + 10
    _, reader = noted(*[(State.BUSY, 0.015625), (State.WAITING_FOR_SLOT, 0.015625)] * num)
    blocks = read(reader, num / 32)
    assert len(blocks) == RING_BLOCKS - 1
    assert blocks[-1].stop == num / 32


@given(st.lists(st.tuples(st.sampled_from(State), st.floats(0, 0.05)), max_size=100))
def test_no_second_is_lost_or_told_twice(spans: list[tuple[State, float]]) -> None:
    made, reader = noted(*spans)
    whole = sum(seconds for _, seconds in spans)
    blocks = read(reader, whole)
    for earlier, later in itertools.pairwise(blocks):
        assert later.start == pytest.approx(earlier.stop)
    assert sum(sum(block.seconds) for block in blocks) > whole - 2 * RESOLUTION_SECONDS
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch).now = whole
        totals = made.totals(1)
    for state in State:
        assert totals[state] == pytest.approx(sum(seconds for each, seconds in spans if each == state))


def test_a_track_that_nobody_writes_says_nothing() -> None:
    made, reader = noted()
    assert made.totals(0) == [0.0] * len(State)
    assert [block for block in read(reader, 100.0) if block.track == 0] == []


def work(connection: Connection, made: Tracks) -> None:
    made.enter(0, State.BUSY)
    connection.send(None)
    connection.recv()


def test_what_a_killed_worker_was_doing_is_known() -> None:
    made = Tracks(processes.context(), ["worker 0"])
    reader = TracksReader(made)
    ours, theirs = processes.context().Pipe()
    process: Any = processes.start(work, theirs, made)
    theirs.close()
    ours.recv()
    time.sleep(0.05)
    process.kill()
    process.join()
    made.enter(0, State.RESTARTING)
    ours.close()
    (block,) = reader.read()
    assert block.seconds[State.BUSY] >= 0.05
    assert made.current(0) is not None


class InAHurry(Tracks):
    """Its writer completes two blocks, of a second each, whenever somebody has just read the others."""

    moment = 0.0

    def blocks(self, track: int, first: int, count: int) -> list[Block]:
        found = super().blocks(track, first, count)
        self.enter(0, State.WAITING_FOR_SLOT, at=self.moment + 1)
        self.enter(0, State.BUSY, at=self.moment + 2)
        self.moment += 2
        return found


def test_what_is_written_during_a_look_is_told_at_the_next() -> None:
    tracks = InAHurry(processes.context(), ["worker 0"])
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch)
        reader = TracksReader(tracks)
        tracks.enter(0, State.BUSY)
    told = [sum(sum(block.seconds) for block in read(reader, tracks.moment)) for _ in range(5)]
    assert told == [0.0, 2.0, 2.0, 2.0, 2.0]
