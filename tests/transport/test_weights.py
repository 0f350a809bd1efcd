"""Weights are never torn, however hard a writer writes."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import numpy as np

from freerun.transport import processes
from freerun.transport.weights import WeightsBoard

NUM_WEIGHTS = 100_000
STRESS_SECONDS = 30.0


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
