"""Real learners for tests: processes that meet over gloo on this machine, each with its share of what there is."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import preloaded_python

from freerun.core import LearnerGroup
from freerun.transport.learner_place import LearnerPlace
from freerun.transport.torch_learners import TorchLearnerGroup, listen

SECONDS = 100.0


def together(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(peers, *arguments)` returns in each of so many processes, of which this one is the first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # `work` may come from a test's own module
    with listen("127.0.0.1") as server, tempfile.TemporaryDirectory() as folder:
        port = server.getsockname()[1]
        mine, *others = (LearnerPlace(index, count, "127.0.0.1", port, index, count) for index in range(count))
        processes = []
        for place in others:
            task, result = Path(folder) / f"task {place.index}", Path(folder) / f"result {place.index}"
            task.write_bytes(pickle.dumps((place, work, arguments)))
            words = ["-m", "learner_processes", str(task), str(result)]
            processes.append((preloaded_python.Process(words, stderr=subprocess.PIPE, env=environment), result))
        with ThreadPoolExecutor(1) as thread:
            found = [thread.submit(_worked, mine, server, work, arguments).result(SECONDS)]
        for process, result in processes:
            _, error = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, error
            found.append(pickle.loads(result.read_bytes()))
    return found


def _worked(place: LearnerPlace, server: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    peers = TorchLearnerGroup(place, "cpu", server)
    try:
        return work(peers, *arguments)
    finally:
        peers.close()


def share(peers: LearnerGroup, things: list[Any]) -> list[Any]:
    """Every count-th, as episodes are shared out."""
    return things[peers.index :: peers.count]


def main(task: str, result: str) -> None:
    """Be one of the other learners."""
    import torch

    torch.set_num_threads(1)
    place, work, arguments = pickle.loads(Path(task).read_bytes())
    Path(result).write_bytes(pickle.dumps(_worked(place, None, work, arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
