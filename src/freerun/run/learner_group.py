"""Several learners: who they are, how they are started, and how they end together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from freerun.core import EnvFailure, FollowerStart, LearnerFailure, LearnerGroup, SingleLearner, UserError
from freerun.settings.config import AnyConfig
from freerun.settings.factories import is_tensors
from freerun.settings.registry import find_mode, flatten_config
from freerun.transport import learner_place, processes
from freerun.transport.learner_place import LearnerPlace

LOOK_SECONDS = 0.2
"""How long the watch waits for news of the others before it looks whether the run is over."""
LEAVE_SECONDS = 10.0
"""The time that ending learners get to close their environments."""
NOTICE_SECONDS = 1.0
"""The pause between two signals to a main thread that has not noticed the first."""
BETTER_REASON_SECONDS = 2.0
"""When one learner ends, the connections of the others break, and their errors may arrive before its own."""


@dataclass(frozen=True)
class Learner:
    """This process's part in a run."""

    peers: LearnerGroup
    config: AnyConfig
    """Its share of the workers and its device. All learners but the first show and keep nothing."""
    interrupted: Callable[[], None] = lambda: None
    """Call it on KeyboardInterrupt: it raises the failure of another learner, which interrupts this one too."""


@contextlib.contextmanager
def joined(config: AnyConfig, run: Callable[..., Any]) -> Iterator[Learner]:
    """Start the other learners, if nobody else has, and meet them. Each of them calls `run` with the same config."""
    if config.num_learners == 1:
        yield Learner(SingleLearner(), config)
        return
    from freerun.transport.torch_learners import TorchLearnerGroup, listen

    with contextlib.ExitStack() as stack:
        mine, server, watch = learner_place.current(), None, None
        _check_workers(config)
        if mine is None:
            _check_devices(config)
            host = stack.enter_context(_meeting_point(config))
            # Listen before the others start, so that their first attempt to connect finds somebody.
            server = stack.enter_context(listen(host))
            port, count = server.getsockname()[1], config.num_learners
            mine, *others = (LearnerPlace(index, count, host, port, index, count) for index in range(count))
            start = _RayFollowers if _uses_ray(config) else _LocalFollowers
            watch = stack.enter_context(FollowerWatch(start(cloudpickle.dumps((run, config)), others)))
        peers = TorchLearnerGroup(mine, config.device, server, watch.check if watch else None)
        stack.callback(peers.close)
        _check_same(flatten_config(config), peers)
        folder = None if mine.index == 0 else stack.enter_context(tempfile.TemporaryDirectory())
        yield Learner(peers, _part_of(config, mine, folder), watch.interrupted if watch else Learner.interrupted)


def _uses_ray(config: AnyConfig) -> bool:
    return find_mode(config.mode).traits.followers is FollowerStart.RAY_TASKS


def _shares_workers(config: AnyConfig) -> bool:
    """True if --num-workers are shared out; otherwise each learner has as many as the mode's settings say."""
    has_own = config.collector.num_workers is not None or is_tensors(config)
    return not has_own and find_mode(config.mode).traits.workers_flag is not None


def _check_workers(config: AnyConfig) -> None:
    num_workers = config.num_workers or 1
    if find_mode(config.mode).traits.followers is None:
        raise UserError(f"--mode {config.mode} serves one learner: leave --num-learners out")
    if _shares_workers(config) and num_workers < config.num_learners:
        raise UserError(
            f"{config.num_learners} learners share {num_workers} workers: raise --num-workers, one each at least"
        )


def _check_devices(config: AnyConfig) -> None:
    if _uses_ray(config) and config.device.startswith("cuda"):
        raise UserError(
            f"--num-learners with --mode {config.mode} is for learners on CPUs: on GPUs start them with torchrun"
        )


def _check_same(settings: dict[str, Any], peers: LearnerGroup) -> None:
    # Learners that torchrun has started read their settings each for itself, so they may differ.
    for other in peers.gather(settings):
        different = [name for name in settings if other[name] != settings[name]]
        if different:
            name = different[0]
            raise UserError(f"the learners have different settings: {name} is {settings[name]!r} and {other[name]!r}")


def _part_of(config: AnyConfig, mine: LearnerPlace, folder: str | None) -> AnyConfig:
    changes: dict[str, Any] = {}
    if _shares_workers(config):
        # Learner i of m gets ceil((n - i) / m) of n workers: the first ones get the rest of the division.
        changes["num_workers"] = ((config.num_workers or 1) + mine.count - 1 - mine.index) // mine.count
    if config.device == "cuda":
        import torch

        # Learners take the GPUs of their machine in turn, and share them if they are more.
        changes["device"] = f"cuda:{mine.local_index % torch.cuda.device_count()}"
    if folder is not None:
        changes |= {
            "run_dir": Path(folder) / "run",
            "quiet": True,
            "watch": False,
            "eval_every": None,
            "display": "auto",
        }
        changes["tracking"] = dataclasses.replace(config.tracking, track=())
    return dataclasses.replace(config, **changes)


# ---------------------------------------------------------------------------------------------- the others


class _LearnerGone(LearnerFailure):
    """A learner ended for a reason of its own; the others then find their connections broken."""


class _Followers(Protocol):
    """The learners that the first has started."""

    def ended(self) -> list[tuple[int, Exception | None]]:
        """Wait a short time; return the learners that have ended since the last call, each with its failure or None."""
        ...

    def close(self, at_once: bool) -> None: ...


class FollowerWatch:
    """Interrupts this thread when a follower fails: `check` then raises the failure."""

    def __init__(self, followers: _Followers):
        self._followers = followers
        self._failures: list[Exception] = []
        self._over, self._noticed = threading.Event(), threading.Event()
        self._interrupted = False
        self._thread = threading.current_thread()
        self._watcher = threading.Thread(target=self._watch, name="freerun-learners", daemon=True)

    def _watch(self) -> None:
        secondary: LearnerFailure | None = None
        deadline = float("inf")
        while not self._over.is_set() and not self._failures:
            for index, failure in self._followers.ended():
                if type(failure) is LearnerFailure:
                    secondary, deadline = secondary or failure, min(deadline, time.monotonic() + BETTER_REASON_SECONDS)
                elif failure is not None:
                    self._failures.append(type(failure)(f"learner {index}: {failure}"))
            if secondary is not None and time.monotonic() > deadline:
                self._failures.append(secondary)
        # The first signal lets an update finish, which this one may never do.
        while self._thread is threading.main_thread() and not self._over.is_set() and not self._noticed.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self._noticed.wait(NOTICE_SECONDS)

    def check(self) -> None:
        if self._failures:
            self._noticed.set()
            raise self._failures[0]

    def interrupted(self) -> None:
        """Raise a follower's failure. If there is none, the user has interrupted the run: followers end at once."""
        self._interrupted = True
        self.check()

    def __enter__(self) -> FollowerWatch:
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._watcher.join()  # first: the watcher's thread and this one must not use the followers at the same time
        self._followers.close(at_once=kind is not None or self._interrupted)
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self.check()


class _LocalFollowers:
    """Learners as processes of this machine. They end when this process ends."""

    def __init__(self, payload: bytes, places: Sequence[LearnerPlace]):
        context = processes.server_context()
        self._running: dict[Connection, int] = {}
        self._processes: dict[int, SpawnProcess] = {}
        for one in places:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_follow, args=(there, payload, one), name=f"freerun-learner-{one.index}")
            with processes.without_main():
                process.start()
            there.close()  # so that `recv` raises EOFError as soon as the process has died
            self._running[here] = one.index
            self._processes[one.index] = process

    def ended(self) -> list[tuple[int, Exception | None]]:
        if not self._running:
            time.sleep(LOOK_SECONDS)
        return [self._heard(connection) for connection in wait(list(self._running), LOOK_SECONDS)]

    def _heard(self, connection: Any) -> tuple[int, Exception | None]:
        index = self._running.pop(connection)
        try:
            return index, connection.recv()
        except EOFError:
            process = self._processes[index]
            process.join()  # its pipe closes a moment before its exit code is known
            code = process.exitcode or 0
            how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
            return index, _LearnerGone(f"its process {how}")

    def close(self, at_once: bool) -> None:
        if at_once:
            for process in self._processes.values():
                process.terminate()
        processes.stop(self._processes.values(), LEAVE_SECONDS)


def _follow(connection: Connection, payload: bytes, mine: LearnerPlace) -> None:
    processes.end_with_parent()
    os.setsid()  # Ctrl-C is the first learner's business: it ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # `close` sends SIGTERM. As a KeyboardInterrupt it closes environments and workers on its way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Nobody is left to hear of a failure if the first learner has ended this one, or has died itself.
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        connection.send(_followed(payload, mine))


def _followed(payload: bytes, mine: LearnerPlace) -> Exception | None:
    """Run a learner to its end; return its failure, or None if it has finished."""
    learner_place.assign(mine)
    try:
        run, config = pickle.loads(payload)
        run(config)
    except (UserError, EnvFailure, LearnerFailure) as failure:
        return failure
    except Exception:
        return _LearnerGone(f"it failed:\n{traceback.format_exc()}")
    return None


# ---------------------------------------------------------------------------------------------- through Ray


@contextlib.contextmanager
def _meeting_point(config: AnyConfig) -> Iterator[str]:
    """Yield the address where learners find the first one."""
    if not _uses_ray(config):
        yield "127.0.0.1"
        return
    if (package := find_mode(config.mode).traits.package) is not None:
        package.require(f"--mode {config.mode}")
    import ray

    from freerun.collecting.ray.ray_cluster import connect

    connection = connect(config.collector, config.num_workers or 1)
    try:
        yield "127.0.0.1" if connection.is_private else ray.util.get_node_ip_address()
    finally:
        connection.close()


class _RayFollowers:
    """Learners as Ray tasks, on the nodes that have room. Ray ends them when this process ends."""

    def __init__(self, payload: bytes, places: Sequence[LearnerPlace]):
        import ray

        self._ray = ray
        # No CPU is reserved for a learner: the workers have them. There is no retry: the others could not go on with a
        # learner that has begun anew.
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")(_follow_in_ray)
        # Nodes of the cluster look for the user's own modules in the same folders.
        paths = [path for path in sys.path if path]
        self._running = {task.remote(payload, one, paths): one.index for one in places}

    def ended(self) -> list[tuple[int, Exception | None]]:
        if not self._running:
            time.sleep(LOOK_SECONDS)
            return []
        ready, _ = self._ray.wait(list(self._running), timeout=LOOK_SECONDS)
        found: list[tuple[int, Exception | None]] = []
        for reference in ready:
            index = self._running.pop(reference)
            try:
                found.append((index, self._ray.get(reference)))
            except self._ray.exceptions.RayError as error:
                found.append((index, _LearnerGone(f"it is lost: {' '.join(str(error).split())[:500]}")))
        return found

    def close(self, at_once: bool) -> None:
        if not at_once:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=LEAVE_SECONDS)
        for reference in self._running:
            self._ray.cancel(reference, force=True)


def _follow_in_ray(payload: bytes, mine: LearnerPlace, paths: Sequence[str]) -> Exception | None:
    sys.path.extend(path for path in paths if path not in sys.path)
    return _followed(payload, mine)
