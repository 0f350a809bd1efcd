"""Collectors in threads of the learner's process, for environments that leave Python's lock to others as they step."""

from __future__ import annotations

import copy
import itertools
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium

from freerun.collectors.exchange import Exchange
from freerun.collectors.rollout import Rollout, in_order, noted
from freerun.collectors.segments import segment_dial
from freerun.collectors.solo import Solo
from freerun.collectors.stream import Stream
from freerun.collectors.supervision import START_SECONDS, Silence, look_seconds, thread_stack
from freerun.collectors.worker import make_rollout, reporting
from freerun.core import CollectorSettings, Dial, EnvFactory, EnvFailure, FloatArray, Policy, State, WorkerHung
from freerun.transport import processes
from freerun.transport.pulse import Vitals

CLOSE_SECONDS = 1.0
TRIAL_SECONDS = 0.03
NUM_TRIALS = 5
MOST_TRIAL_SECONDS = 30.0


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
        num_workers = settings.most_workers
        super().__init__(settings, stream, tolerant=True)
        self._stride = num_workers
        self._timeout = settings.step_timeout
        self._stream = stream
        self._segment_steps = self._configured_steps = segment_steps
        mine = copy.deepcopy(policy)  # the learner goes on with the other
        self._make_rollout: Callable[[], Rollout | Solo] = lambda: make_rollout(
            factory, copy.deepcopy(mine), settings.seed, envs_per_worker
        )
        self._begun = [stream.parts.next_episode(index) - num_workers for index in range(num_workers)]
        self._newest: tuple[FloatArray, int] | None = None
        self._closing = threading.Event()
        self._ready: set[int] = set()
        self._vitals = [Vitals() for _ in range(num_workers)]
        self._silence = Silence(look_seconds(self._timeout))
        num_parked = num_workers - settings.num_workers
        self._states = ["starting"] * settings.num_workers + ["waiting"] * num_parked
        self._units = [-1] * num_workers  # that each is at
        self._threads = [self._thread(index) for index in range(num_workers)]
        self._watch = threading.Thread(target=self._look, name="freerun-watch", daemon=True)
        self._start()

    def _thread(self, index: int) -> threading.Thread:
        name = f"freerun-collector-{index}"
        return threading.Thread(target=self._work, args=(index,), name=name, daemon=True)

    def _start(self) -> None:
        super()._start()
        try:
            for thread in self._threads[: self.num_workers]:
                thread.start()
            self._watch.start()
            self._wait_for(lambda: len(self._ready) == self.num_workers or None)
        except BaseException:
            self.close()
            raise

    def dials(self) -> list[Dial]:
        if self._bounds is None:
            return []

        def turn_segments(value: float) -> None:
            self._segment_steps = int(value)

        read, most = lambda: self.num_workers, float(self._stride)
        workers = Dial("num_workers", read, self._turn_workers, 1.0, most, is_settled=self._is_complete)
        segments = segment_dial(self._configured_steps, lambda: self._segment_steps, turn_segments)
        return [*([workers] if self._stride > 1 else []), self._queue_dial(self._stream), segments]

    def _turn_workers(self, value: float) -> None:
        """Collectors that are too many end when they have handed over what they began."""
        with self._changed:
            self.num_workers = int(value)
            for thread in self._threads[: self.num_workers]:
                if thread.ident is None:
                    thread.start()

    def _is_complete(self) -> bool:
        return self._ready == set(range(self.num_workers))

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
        for thread in [*self._threads, self._watch]:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------ a collector's thread

    def _work(self, index: int) -> None:
        failures: list[Exception] = []
        while self._is_mine(index):
            with reporting(failures.append):
                try:
                    self._collect(index)
                except SystemExit as exit_:  # would end a process, and this thread without a word
                    raise EnvFailure(f"the environment called sys.exit({exit_.code!r})") from None
            if failures and self._is_mine(index):
                rest_seconds = self._fail(index, failures.pop())
                if rest_seconds is None:
                    return
                self._closing.wait(rest_seconds)

    def _fail(self, index: int, failure: Exception) -> float | None:
        """The seconds to rest; None if the run ends."""
        self._tracks.enter(index, State.RESTARTING)
        with self._changed:
            self._states[index] = "resting"
            self._stream.lost(self._units[index])
            self._stream.parts.end_worker(index, self._begun[index])
        try:
            return self._restart_after(index, failure)
        except Exception as end:  # reaches the user through `collect`
            self._end_with(end)
            return None

    def _is_mine(self, index: int) -> bool:
        """Whether this thread is still the one that collects: nothing more is taken from one that hung."""
        return self._threads[index] is threading.current_thread() and not self._closing.is_set()

    def _collect(self, index: int) -> None:
        """With new environments, until the run ends or one of them fails."""
        self._states[index] = "starting"
        vitals = self._vitals[index]
        rollout = self._make_rollout()
        rollout.vitals = vitals
        try:
            with self._changed:
                self._ready.add(index)
                self._states[index] = "waiting"
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._newest is not None or self._closing.is_set())
                if not self._is_mine(index):
                    return
                self._begun[index] = self._stream.parts.begin_worker(index) - self._stride
                numbers = noted(self._begun, index, self._stride)
            segments = rollout.segments(lambda: self._segment_steps, in_order(self._while_mine(index, numbers)))
            version = -1
            while self._is_mine(index):
                if self._has_retired(index):
                    return
                with self._changed:
                    unit = self._stream.next()
                if unit is None:
                    self._tracks.enter(index, State.WAITING_FOR_SLOT)
                    self._closing.wait(self._stream.seconds_to_next())
                    continue
                self._tracks.enter(index, State.BUSY)
                version = self._refresh(rollout, version)
                self._units[index] = unit
                self._states[index] = "busy"
                segment = next(segments).copy()
                if not self._is_mine(index):
                    return
                self._finish(index, unit, segment)
                self._states[index] = "waiting"
                with self._changed:
                    self._changed.notify_all()
        finally:
            rollout.close()

    def _has_retired(self, index: int) -> bool:
        """One collector too many leaves its place to a thread that may be started later."""
        with self._changed:
            if index < self.num_workers:
                return False
            self._stream.parts.retire_worker(index)
            self._threads[index] = self._thread(index)
            self._ready.discard(index)
        self._tracks.enter(index, State.PARKED)
        return True

    def _while_mine(self, index: int, numbers: Iterator[int]) -> Iterator[int]:
        while self._is_mine(index):
            yield next(numbers)
        raise EnvFailure("this thread was given up")

    def _refresh(self, rollout: Rollout | Solo, version: int) -> int:
        """Take the newest weights; their version."""
        assert self._newest is not None
        weights, newest = self._newest
        if newest != version:
            rollout.load(weights, newest)
        return newest

    # ------------------------------------------------------------------------------------------ the watch's thread

    def _look(self) -> None:
        while not self._closing.wait(look_seconds(self._timeout)):
            self._silence.look(
                {index: (self._states[index], vitals.beats) for index, vitals in enumerate(self._vitals)}
            )
            for index, state in enumerate(self._states):
                limit = max(self._timeout, START_SECONDS) if state == "starting" else self._timeout
                if state in ("starting", "busy") and self._silence.seconds(index) >= limit:
                    self._give_up(index)

    def _give_up(self, index: int) -> None:
        """A thread cannot be ended: another takes its place, and what it may still bring is not taken."""
        seconds, stack = self._silence.seconds(index), thread_stack(self._threads[index].ident)
        with self._changed:
            self._threads[index], self._vitals[index] = self._thread(index), Vitals()
        hung = WorkerHung(
            f"collector {index} showed no sign of life for {seconds:.1f} s (--step-timeout {self._timeout:g}); "
            f"its stack:\n{stack}"
        )
        rest_seconds = self._fail(index, hung)
        if rest_seconds is not None and not self._closing.wait(rest_seconds):
            with self._changed:
                if self._threads[index].ident is None:
                    self._threads[index].start()


def speed_up_by_threads(factory: EnvFactory) -> float | None:
    """How many times the steps of one environment two get done, each in a thread: 1 if they hold Python's lock.

    Tried out in a process of its own, for an environment may take that with it; None if it fails or gets stuck.
    """
    ours, theirs = processes.context().Pipe()
    process = processes.start(_measure, theirs, cloudpickle.dumps(factory))
    theirs.close()
    try:
        return ours.recv() if ours.poll(MOST_TRIAL_SECONDS) else None
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
    start = _Start()
    with ThreadPoolExecutor(2) as pool:
        (alone, together), (_, others) = pool.map(lambda place: _try_out(factory, place == 0, start), range(2))
    # One alone at its best: what else the machine does must not make two look better than they are.
    return statistics.median(map(sum, zip(together, others, strict=True))) / max(alone)


class _Start(threading.Barrier):
    """A start for two threads, and when it was: one that must wait for Python's lock first has begun all the same."""

    def __init__(self) -> None:
        super().__init__(2, self._note)
        self.seconds = 0.0

    def _note(self) -> None:
        self.seconds = time.perf_counter()


def _try_out(factory: EnvFactory, is_first: bool, start: _Start) -> tuple[list[float], list[float]]:
    """Steps per second of an environment that is built and stepped in this thread: the first alone, then both."""
    try:
        env = factory.make_lane()
        env.reset(seed=0)
        env.action_space.seed(0)
        action = env.action_space.sample()
        alone, together = [], []
        for _ in range(NUM_TRIALS):
            start.wait()
            if is_first:
                alone.append(steps_per_second(env, action, start.seconds))
            start.wait()
            together.append(steps_per_second(env, action, start.seconds))
        env.close()
    except BaseException:
        start.abort()  # or the other thread would wait for this one
        raise
    return alone, together


def steps_per_second(env: gymnasium.Env[Any, Any], action: Any, started: float) -> float:
    for num_steps in itertools.count(1):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset(seed=num_steps)
        if (seconds := time.perf_counter() - started) >= TRIAL_SECONDS:
            break
    return num_steps / seconds
