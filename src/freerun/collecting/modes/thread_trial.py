"""A trial in a process of its own: how much faster two threads step two environments than one thread steps one."""

from __future__ import annotations

import itertools
import pickle
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium

from freerun.core import EnvFactory, UserError
from freerun.transport import processes

TRIAL_SECONDS = 0.03
NUM_TRIALS = 5
MAX_TRIAL_SECONDS = 30.0


def speed_up_by_threads(factory: EnvFactory) -> float | None:
    """Return how many times faster two threads step two environments than one steps one: 1 if they hold Python's lock.

    This is tried in a process of its own, because a failing environment may end its process. The result is None if the
    trial fails or gets stuck. What no other way of collecting could mend either is raised.
    """
    try:
        answer: float | UserError | None = processes.ask(
            _measure, cloudpickle.dumps(factory), seconds=MAX_TRIAL_SECONDS
        )
    except (TimeoutError, ChildProcessError):
        return None
    if isinstance(answer, UserError):
        raise answer
    return answer


def _measure(connection: Connection, factory: bytes) -> None:
    processes.enter_worker()
    answer: float | UserError | None
    try:
        answer = _speed_up(pickle.loads(factory))
    except UserError as error:
        answer = error
    except Exception:
        answer = None  # the collectors will meet it again and report it
    connection.send(answer)


def _speed_up(factory: EnvFactory) -> float:
    start = _SharedStart()
    with ThreadPoolExecutor(2) as pool:
        (alone, together), (_, others) = pool.map(lambda place: _step_in_thread(factory, place == 0, start), range(2))
    # The best of one thread alone: other load on the machine must not make two threads look better than they are.
    return statistics.median(map(sum, zip(together, others, strict=True))) / max(alone)


class _SharedStart(threading.Barrier):
    """A common start of two threads that notes its time: a thread that must first wait for Python's lock began too."""

    def __init__(self) -> None:
        super().__init__(2, self._note_time)
        self.seconds = 0.0

    def _note_time(self) -> None:
        self.seconds = time.perf_counter()


def _step_in_thread(factory: EnvFactory, is_first: bool, start: _SharedStart) -> tuple[list[float], list[float]]:
    """Return the steps per second of this thread's environment in each trial: the first one alone, then both."""
    try:
        env = factory.make_one()
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
        start.abort()  # otherwise the other thread would wait for this one for ever
        raise
    return alone, together


def steps_per_second(env: gymnasium.Env[Any, Any], action: object, started: float) -> float:
    """Step an environment until a trial's time is over; return the steps per second since it started."""
    for num_steps in itertools.count(1):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset(seed=num_steps)
        if (seconds := time.perf_counter() - started) >= TRIAL_SECONDS:
            break
    return num_steps / seconds
