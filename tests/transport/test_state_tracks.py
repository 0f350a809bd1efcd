"""State tracks report every second exactly once, across processes, however short the spans are."""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording_context import RecordingContext

from freerun.core import State
from freerun.transport import processes
from freerun.transport.state_tracks import (
    CHECK,
    COUNT,
    RESOLUTION_SECONDS,
    RING,
    RING_BLOCKS,
    RING_ENTRY,
    ROW,
    SINCE,
    STATE,
    SharedTracks,
    TrackBlock,
    TracksReader,
)


class Clock:
    """Replaces `time.perf_counter` by a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr("freerun.transport.state_tracks.time.perf_counter", lambda: self.now)


def noted(*spans: tuple[State, float]) -> tuple[SharedTracks, TracksReader]:
    """Write these spans to track 1 of two. The last state has not ended."""
    return noted_in(processes.context(), *spans)


def noted_in(context: ForkServerContext, *spans: tuple[State, float]) -> tuple[SharedTracks, TracksReader]:
    made = SharedTracks(context, ["a", "b"])
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        reader = TracksReader(made)
        for state, seconds in spans:
            made.set_state(1, state)
            clock.now += seconds
        made.set_state(1, State.BUSY)
    return made, reader


def read(reader: TracksReader, now: float) -> list[TrackBlock]:
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch).now = now
        return reader.read()


def of(**seconds: float) -> tuple[float, ...]:
    return tuple(seconds.get(state.name.lower(), 0.0) for state in State)


def test_long_spans_stand_alone() -> None:
    _, reader = noted((State.BUSY, 0.5), (State.WAITING_FOR_SLOT, 0.25), (State.BUSY, 1.0))
    assert read(reader, 1.75) == [
        TrackBlock(1, 0.0, of(busy=0.5)),
        TrackBlock(1, 0.5, of(waiting_for_slot=0.25)),
        TrackBlock(1, 0.75, of(busy=1.0)),
    ]


def test_short_spans_are_added_up() -> None:
    _, reader = noted(*[(State.BUSY, 0.00390625), (State.WAITING_FOR_SLOT, 0.001953125)] * 2)
    assert read(reader, 0.01171875) == [TrackBlock(1, 0.0, of(busy=0.0078125, waiting_for_slot=0.00390625))]


def test_a_long_span_is_reported_in_pieces_before_it_ends() -> None:
    made, reader = noted((State.WAITING_FOR_SLOT, 0.5))
    assert read(reader, 1.0) == [TrackBlock(1, 0.0, of(waiting_for_slot=0.5))]
    assert read(reader, 2.0) == [TrackBlock(1, 0.5, of(busy=1.5))]
    assert read(reader, 2.5) == []
    made.set_state(1, State.WAITING_FOR_SLOT, at=4.5)
    assert read(reader, 4.5) == [TrackBlock(1, 2.0, of(busy=2.5))]


def test_a_reader_that_comes_too_late_misses_the_oldest() -> None:
    num = RING_BLOCKS + 10
    _, reader = noted(*[(State.BUSY, 0.015625), (State.WAITING_FOR_SLOT, 0.015625)] * num)
    blocks = read(reader, num / 32)
    assert len(blocks) == RING_BLOCKS - 1
    assert blocks[-1].stop == num / 32


@given(st.lists(st.tuples(st.sampled_from(State), st.floats(0, 0.05)), max_size=100))
def test_no_second_is_lost_or_reported_twice(spans: list[tuple[State, float]]) -> None:
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


def work(connection: Connection, made: SharedTracks) -> None:
    made.set_state(0, State.BUSY)
    connection.send(None)
    connection.recv()


def test_what_a_killed_worker_was_doing_is_known() -> None:
    made = SharedTracks(processes.context(), ["worker 0"])
    reader = TracksReader(made)
    ours, theirs = processes.context().Pipe()
    process: Any = processes.start(work, theirs, made)
    theirs.close()
    ours.recv()
    time.sleep(0.05)
    process.kill()
    process.join()
    made.set_state(0, State.RESTARTING)
    ours.close()
    (block,) = reader.read()
    assert block.seconds[State.BUSY] >= 0.05
    assert made.current(0) is not None


class InAHurry(SharedTracks):
    """Its writer completes two blocks, of a second each, whenever somebody has just read the others."""

    moment = 0.0

    def blocks(self, track: int, first: int) -> tuple[list[TrackBlock], int]:
        found = super().blocks(track, first)
        self.set_state(0, State.WAITING_FOR_SLOT, at=self.moment + 1)
        self.set_state(0, State.BUSY, at=self.moment + 2)
        self.moment += 2
        return found


def test_what_is_written_during_a_read_is_reported_by_the_next() -> None:
    tracks = InAHurry(processes.context(), ["worker 0"])
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch)
        reader = TracksReader(tracks)
        tracks.set_state(0, State.BUSY)
    reported = [sum(sum(block.seconds) for block in read(reader, tracks.moment)) for _ in range(5)]
    assert reported == [0.0, 2.0, 2.0, 2.0, 2.0]


def test_a_block_whose_count_arrives_first_is_reported_when_it_is_whole() -> None:
    """ARM may show the writer's stores in any order: the count before the block, or half of the block."""
    context = RecordingContext()
    made, reader = noted_in(context, (State.BUSY, 0.5), (State.WAITING_FOR_SLOT, 0.25), (State.BUSY, 1.0))
    (words,) = context.arrays
    place = ROW + RING + RING_ENTRY  # the second block of track 1
    whole = words[place : place + RING_ENTRY]
    for late in range(RING_ENTRY):
        words[place + late] = 0.125  # what lay there before, say
        if whole[late] != 0.125:
            assert made.blocks(1, 1) == ([], 1), "a block that is not whole was reported"
        words[place + late] = whole[late]
    words[place] = 0.125
    assert read(reader, 1.75) == [TrackBlock(1, 0.0, of(busy=0.5))]
    words[place] = whole[0]
    assert read(reader, 1.75) == [TrackBlock(1, 0.5, of(waiting_for_slot=0.25)), TrackBlock(1, 0.75, of(busy=1.0))]


def test_a_block_of_an_earlier_turn_of_the_ring_is_not_taken_for_a_new_one() -> None:
    context = RecordingContext()
    made, _ = noted_in(context, (State.BUSY, 0.5))
    (words,) = context.arrays
    words[ROW + COUNT] = RING_BLOCKS + 1  # the count has arrived, the block that takes this place has not
    assert made.blocks(1, RING_BLOCKS) == ([], RING_BLOCKS)


def test_a_state_and_a_moment_that_do_not_belong_together_are_not_reported() -> None:
    context = RecordingContext()
    made, _ = noted_in(context, (State.WAITING_FOR_SLOT, 3.0))
    (words,) = context.arrays
    before = words[ROW + STATE : ROW + CHECK + 1]
    made.set_state(1, State.RESTARTING, at=8.0)
    after = words[ROW + STATE : ROW + CHECK + 1]
    assert made.current(1) == (State.RESTARTING, 8.0)
    for arrived in itertools.product((False, True), repeat=3):
        seen = [new if has_arrived else old for has_arrived, old, new in zip(arrived, before, after, strict=True)]
        for word, value in zip((STATE, SINCE, CHECK), seen, strict=True):
            words[ROW + word] = value
        whole: dict[tuple[bool, ...], tuple[State, float]] = {
            (False,) * 3: (State.BUSY, 3.0),
            (True,) * 3: (State.RESTARTING, 8.0),
        }
        assert made.current(1) == whole.get(arrived)
