"""Collectors in threads of the learner's process, for environments that leave Python's lock to others as they step."""

from __future__ import annotations

import copy
import itertools
import pickle
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium

from freerun.collectors.exchange import Exchange
from freerun.collectors.rollout import Rollout, in_order, noted
from freerun.collectors.solo import Solo
from freerun.collectors.stream import Stream
from freerun.collectors.worker import make_rollout, reporting
from freerun.core import CollectorSettings, EnvFactory, EnvFailure, FloatArray, Policy, State
from freerun.transport import processes

CLOSE_SECONDS = 1.0
TRIAL_SECONDS = 0.03
NUM_TRIALS = 5


class Threads(Exchange):
    """One thread per collector, with its own environments and its own copy of the policy."""

    def __init__(
        self,
        factory: EnvFactory,
        policy: Policy,
        settings: CollectorSettings,
        envs_per_worker: int,
        segment_steps: int,
        stream: Stream,
    ):
        num_workers = settings.num_workers
        super().__init__(settings, stream, tolerant=True)
        self._stream = stream
        self._segment_steps = segment_steps
        mine = copy.deepcopy(policy)  # the learner goes on with the other
        self._make_rollout: Callable[[], Rollout | Solo] = lambda: make_rollout(
            factory, copy.deepcopy(mine), settings.seed, envs_per_worker
        )
        self._begun = [index - num_workers for index in range(num_workers)]
        self._newest: tuple[FloatArray, int] | None = None
        self._ready: set[int] = set()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"freerun-collector-{index}", daemon=True)
            for index in range(num_workers)
        ]
        self._start()

    def _start(self) -> None:
        super()._start()
        try:
            for thread in self._threads:
                thread.start()
            self._wait_for(lambda: len(self._ready) == self.num_workers or None)
        except BaseException:
            self.close()
            raise

    def publish(self, weights: FloatArray, version: int) -> None:
        with self._changed:
            self._newest = (weights.copy(), version)
            self._stream.version = version
            self._changed.notify_all()

    def close(self) -> None:
        super().close()
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------ a collector's thread

    def _work(self, index: int) -> None:
        failures: list[Exception] = []
        while not self._closing.is_set():
            with reporting(failures.append):
                try:
                    self._collect(index)
                except SystemExit as exit_:  # would end a process, and this thread without a word
                    raise EnvFailure(f"the environment called sys.exit({exit_.code!r})") from None
            if failures:
                self._tracks.enter(index, State.RESTARTING)
                with self._changed:
                    self._stream.parts.end_worker(index, self._begun[index])
                try:
                    self._closing.wait(self._restart_after(index, failures.pop()))
                except Exception as failure:  # reaches the user through `collect`
                    self._end_with(failure)
                    return

    def _collect(self, index: int) -> None:
        """With new environments, until the run ends or one of them fails."""
        rollout = self._make_rollout()
        try:
            with self._changed:
                self._ready.add(index)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._newest is not None or self._closing.is_set())
            segments = rollout.segments(self._segment_steps, in_order(noted(self._begun, index, self.num_workers)))
            version = -1
            while not self._closing.is_set():
                with self._changed:
                    unit = self._stream.next()
                if unit is None:
                    self._tracks.enter(index, State.WAITING_FOR_SLOT)
                    self._closing.wait(self._stream.seconds_to_next())
                    continue
                self._tracks.enter(index, State.BUSY)
                version = self._refresh(rollout, version)
                self._finish(index, unit, next(segments).copy())
                with self._changed:
                    self._changed.notify_all()
        finally:
            rollout.close()

    def _refresh(self, rollout: Rollout | Solo, version: int) -> int:
        """Take the newest weights; their version."""
        assert self._newest is not None
        weights, newest = self._newest
        if newest != version:
            rollout.load(weights, newest)
        return newest


def speed_up_by_threads(factory: EnvFactory) -> float | None:
    """How many times the steps of one environment two get done, each in a thread: 1 if they hold Python's lock.

    Tried out in a process of its own, for an environment may take that with it; None if it fails.
    """
    ours, theirs = processes.context().Pipe()
    process = processes.start(_measure, theirs, cloudpickle.dumps(factory))
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        return None
    finally:
        ours.close()
        processes.stop([process], CLOSE_SECONDS)


def _measure(connection: Connection, factory: bytes) -> None:
    processes.enter_worker()
    try:
        speed_up = _speed_up(pickle.loads(factory))
    except Exception:
        speed_up = None  # the collectors will meet it again, and say so
    connection.send(speed_up)


def _speed_up(factory: EnvFactory) -> float:
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        (alone, together), (_, others) = pool.map(lambda place: _try_out(factory, place == 0, barrier), range(2))
    # One alone at its best: what else the machine does must not make two look better than they are.
    return statistics.median(map(sum, zip(together, others, strict=True))) / max(alone)


def _try_out(factory: EnvFactory, is_first: bool, barrier: threading.Barrier) -> tuple[list[float], list[float]]:
    """Steps per second of an environment that is built and stepped in this thread: the first alone, then both."""
    try:
        env = factory.make_lane()
        env.reset(seed=0)
        alone, together = [], []
        for _ in range(NUM_TRIALS):
            barrier.wait()
            if is_first:
                alone.append(_steps_per_second(env))
            barrier.wait()
            together.append(_steps_per_second(env))
        env.close()
    except BaseException:
        barrier.abort()  # or the other thread would wait for this one
        raise
    return alone, together


def _steps_per_second(env: gymnasium.Env[Any, Any]) -> float:
    env.action_space.seed(0)
    action = env.action_space.sample()
    started = time.perf_counter()
    for num_steps in itertools.count(1):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset(seed=num_steps)
        if (seconds := time.perf_counter() - started) >= TRIAL_SECONDS:
            break
    return num_steps / seconds
