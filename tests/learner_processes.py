"""Real learners for tests: processes that meet over gloo on this machine, each with its share of what there is."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from freerun.core import LearnerGroup
from freerun.transport.learner_place import LearnerPlace
from freerun.transport.torch_learners import TorchLearnerGroup, listen

SECONDS = 100.0


def together(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(peers, *arguments)` returns in each of so many processes."""
    context = multiprocessing.get_context("spawn")
    with listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        connections, processes = [], []
        for index in range(1, count):
            here, there = context.Pipe(duplex=False)
            place = LearnerPlace(index, count, "127.0.0.1", port, index, count)
            process = context.Process(target=_join, args=(there, place, work, arguments), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            processes.append(process)
        with ThreadPoolExecutor(1) as thread:
            place = LearnerPlace(0, count, "127.0.0.1", port, 0, count)
            first = thread.submit(_worked, place, server, work, arguments)
            found = [first.result(SECONDS)]
        for connection, process in zip(connections, processes, strict=True):
            assert connection.poll(SECONDS)
            found.append(pickle.loads(connection.recv_bytes()))
            process.join(SECONDS)
            assert process.exitcode == 0, found[-1]
    return found


def _worked(place: LearnerPlace, server: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    peers = TorchLearnerGroup(place, "cpu", server)
    try:
        return work(peers, *arguments)
    finally:
        peers.close()


def _join(connection: Connection, place: LearnerPlace, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        result = _worked(place, None, work, arguments)
    except BaseException:
        result = traceback.format_exc()
        raise
    finally:
        connection.send_bytes(pickle.dumps(result))  # as it is: torch would have tensors fetched later


def share(peers: LearnerGroup, things: list[Any]) -> list[Any]:
    """Every count-th, as episodes are shared out."""
    return things[peers.index :: peers.count]
