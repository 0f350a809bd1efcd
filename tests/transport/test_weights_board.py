"""Weights are never torn, however hard a writer writes."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from recording_context import RecordingContext

from freerun.core import Array
from freerun.transport import processes
from freerun.transport.weights_board import WeightsBoard

NUM_WEIGHTS = 100_000
STRESS_SECONDS = 2.0


def make_board(num_weights: int) -> tuple[WeightsBoard, list[Array]]:
    """A board, and views of its memory: the marks, the checksums, and the weights of both buffers."""
    context = RecordingContext()
    board = WeightsBoard(context, num_weights)
    marks, checksums, weights = context.arrays
    return board, [
        np.frombuffer(marks, np.int64),
        np.frombuffer(checksums, np.int64),
        np.frombuffer(weights, np.float32),
    ]


def _read_for_a_while(connection: Connection, board: WeightsBoard) -> None:
    """Every buffer holds its version in every element: a mixture shows."""
    deadline = time.monotonic() + STRESS_SECONDS
    num_reads = num_torn = 0
    versions = set()
    while time.monotonic() < deadline:
        weights, version = board.read()
        num_reads += 1
        num_torn += int((weights != np.float32(version)).any())
        versions.add(version)
    connection.send((num_reads, num_torn, len(versions)))


def test_readers_see_whole_versions_while_a_writer_hammers() -> None:
    context = processes.context()
    board = WeightsBoard(context, NUM_WEIGHTS)
    board.publish(np.zeros(NUM_WEIGHTS, np.float32), 0)
    pipes = [context.Pipe() for _ in range(2)]
    readers = [processes.start(_read_for_a_while, theirs, board) for _, theirs in pipes]
    version = 0
    while any(reader.is_alive() for reader in readers):
        version += 1
        board.publish(np.full(NUM_WEIGHTS, version, np.float32), version)
    for (ours, _), reader in zip(pipes, readers, strict=True):
        num_reads, num_torn, num_versions = ours.recv()
        reader.join()
        assert num_torn == 0
        assert num_reads > 10
        assert num_versions > 5, "a reader must not starve"


def test_board_waits_for_the_first_version_and_then_keeps_the_newest() -> None:
    board = WeightsBoard(processes.context(), 3)
    assert board.version == -1
    for version in range(5):
        board.publish(np.full(3, version, np.float32), version)
    weights, version = board.read()
    assert version == 4
    assert weights.tolist() == [4, 4, 4]


def test_a_version_whose_weights_arrive_last_is_read_when_they_are_whole() -> None:
    """ARM may show the writer's stores in any order: here the marks come first, and the weights in two halves."""
    board, (_, _, data) = make_board(4)
    for version in (0, 1, 2):
        board.publish(np.full(4, version, np.float32), version)
    data[:4] = 0.0  # the marks say 2, and what lies in the buffer is still version 0
    found: list[tuple[list[float], int]] = []

    def read() -> None:
        weights, version = board.read()
        found.append((weights.tolist(), version))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for number in range(2):
        reader.join(0.1)  # long enough for many tries
        assert not found, "a mixture was returned"
        data[2 * number : 2 * number + 2] = 2.0
    reader.join(30)
    assert found == [([2.0] * 4, 2)]


@given(st.lists(st.booleans(), min_size=11, max_size=11), st.integers(0, 3))
def test_no_mixture_of_two_versions_is_ever_returned(arrived: list[bool], version: int) -> None:
    """Whatever the order of stores and loads, a reader sees for each word either its old value or its new one."""
    numbers = np.random.default_rng(version).normal(size=(4, 3)).astype(np.float32)
    board, memory = make_board(3)
    for earlier in range(version):
        board.publish(numbers[earlier], earlier)
    before = [part.copy() for part in memory]
    board.publish(numbers[version], version)
    after = [part.copy() for part in memory]
    words = [(part, word) for part, array in enumerate(memory) for word in range(len(array))]
    for (part, word), has_arrived in zip(words, arrived, strict=True):
        memory[part][word] = (after if has_arrived else before)[part][word]
    found = board.try_read()
    if found is not None:
        weights, found_version = found
        assert found_version in (version, version - 1)
        np.testing.assert_array_equal(weights, numbers[found_version])
    if all(arrived):
        assert found is not None
        assert found[1] == version


def test_a_version_that_lies_whole_in_the_buffer_of_another_is_not_taken_for_it() -> None:
    board, (marks, _, _) = make_board(3)
    for version in range(3):
        board.publish(np.full(3, version, np.float32), version)
    marks[0] = marks[2] = 4  # the marks of version 4 have arrived, nothing else of it
    assert board.try_read() is None
