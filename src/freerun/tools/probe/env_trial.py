"""Tries out an environment in a process of its own, so that the probe survives whatever the environment does."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import psutil

from freerun.adapters.env_adapter import EnvAdapter
from freerun.adapters.gymnasium_envs import EnvName, GymnasiumFactory
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.core import EnvFailure, EnvSpec, Policy, UserError, WorkerDied, WorkerHung
from freerun.transport import processes
from freerun.transport.stack_capture import StackFile

Recipe = tuple[EnvName, dict[str, Any], int | None, bool, bool, str | None]
"""The arguments of a `GymnasiumFactory`."""
MOST_STEPS = 20_000
ENOUGH_STEPS, ENOUGH_EPISODES, ENOUGH_SECONDS = 3000, 20, 1.0
"""The environment is played with until it has reached all three, the time that it is given, or MOST_STEPS."""
LOOP_SECONDS = 0.4
STEPS_AT_ONCE = 64
"""Steps of one segment where the loop itself is timed: enough that handing a segment over costs little per step."""
INFERENCES = 300
INFERENCE_BATCH = 64
ROUND_SECONDS = 0.3
"""A round of inferences takes no longer than this, or one inference."""


class EnvTrial:
    """The process with the environment. Each answer that it owes has a deadline."""

    def __init__(self, recipe: Recipe):
        self._stacks = StackFile()
        self._ours, theirs = processes.context().Pipe()
        self._process = processes.start(_serve, theirs, cloudpickle.dumps(recipe), self._stacks)
        theirs.close()  # with a copy open here, the end of a dead process would never be seen

    def answer(self, doing: str, seconds: float) -> Any:
        """Wait for the answer; a failure in the process is raised here, with its traceback."""
        try:
            if not self._ours.poll(seconds):
                stack = self._stacks.capture(self._process.pid or 0)
                raise WorkerHung(
                    f"{doing} took longer than {seconds:.0f} s, so it cannot be probed; its stack:\n{stack}"
                )
            kind, value = pickle.loads(self._ours.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(1.0)  # the pipe closes a moment before the exit code is known
            raise WorkerDied(f"the process died in {doing} (exit code {self._process.exitcode})") from None
        if kind == "failure":
            raise value
        return value

    def ask(self, request: str, *arguments: object) -> None:
        """Send a request, which is a public method of `_MeasuredEnv`; `answer` waits for what it returns."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` will say that it died
            self._ours.send_bytes(cloudpickle.dumps((request, arguments)))

    def close(self) -> None:
        self._ours.close()
        processes.stop([self._process], 0.5)
        self._stacks.close()


# ---------------------------------------------------------------------------------------------- in the process


def _serve(connection: Connection, recipe: bytes, stacks: StackFile) -> None:
    processes.enter_worker()
    stacks.write_on_signal()
    try:
        measured = _MeasuredEnv(pickle.loads(recipe))
        about = measured.construct_seconds, measured.factory.spec, measured.factory.spec.max_episode_steps
        connection.send_bytes(pickle.dumps(("answer", about)))
        while True:
            request, arguments = pickle.loads(connection.recv_bytes())
            answer = getattr(measured, request)(*arguments)
            connection.send_bytes(pickle.dumps(("answer", answer)))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return  # the probe has ended
    except (UserError, EnvFailure) as failure:
        connection.send_bytes(pickle.dumps(("failure", failure)))
    except BaseException:  # sys.exit() in an environment too
        connection.send_bytes(
            pickle.dumps(("failure", EnvFailure(f"the environment raised\n{traceback.format_exc()}")))
        )


class Played(NamedTuple):
    """What was seen of an environment while it was played with."""

    step_seconds: list[float]
    reset_seconds: list[float]
    episode_lengths: list[int]
    cpu_share: float
    stolen_share: float
    loop_seconds: float
    """Seconds per step that a worker spends outside the environment, when it hands over many steps at once."""
    cpu_seconds: float
    """Processor seconds per step of that worker, with the environment."""
    megabytes: float


class _MeasuredEnv:
    """The environment inside the process. Each public method answers the request of its name."""

    def __init__(self, recipe: Recipe):
        self.factory = GymnasiumFactory(*recipe)
        started = time.perf_counter()
        self._lane = self.factory.make_one()
        self.construct_seconds = time.perf_counter() - started

    def play(self, policy: Policy, most_seconds: float) -> Played:
        """Play as a worker does, with a clock around the environment."""
        timed = _TimedEnv(self._lane)
        solo = SingleEnvRollout(timed, self.factory.spec, policy, run_seed=0)  # type: ignore[arg-type]
        # One step at a time, because a step may take seconds and the time is looked at between segments.
        segments = solo.segments(1, next_from(itertools.count()))
        next(segments)  # the first step and reset may load or compile something
        timed.forget()
        started, used, queued, sleeps = time.perf_counter(), time.process_time(), _queued_seconds(), _num_sleeps()
        while not timed.is_enough(time.perf_counter() - started, most_seconds):
            next(segments)
        wall, cpu = time.perf_counter() - started, time.process_time() - used
        queued, sleeps = _queued_seconds() - queued, _num_sleeps() - sleeps
        longest = max(timed.step_seconds + timed.reset_seconds)
        cpu_share, stolen_share = core_use(wall, cpu, queued, sleeps, longest, timed.seconds)
        return Played(
            timed.step_seconds,
            timed.reset_seconds or timed.first_reset_seconds,
            timed.episode_lengths,
            cpu_share,
            stolen_share,
            *self._loop_seconds(policy, float(np.mean(timed.step_seconds))),
            _megabytes(),
        )

    def _loop_seconds(self, policy: Policy, step_seconds: float) -> tuple[float, float]:
        """Seconds per step of a worker's loop without the environment, and processor seconds per step with it."""
        timed = _TimedEnv(self._lane)
        solo = SingleEnvRollout(timed, self.factory.spec, policy, run_seed=0)  # type: ignore[arg-type]
        at_once = max(1, min(STEPS_AT_ONCE, int(LOOP_SECONDS / step_seconds)))
        segments = solo.segments(at_once, next_from(itertools.count()))
        next(segments)
        timed.forget()
        wall, cpu = per_step(segments, at_once, LOOP_SECONDS)
        # Seconds of the whole loop per step, minus those of the environment with its resets.
        return max(0.0, wall - timed.seconds / len(timed.step_seconds)), cpu

    def step_vector(
        self,
        policy: Policy,
        num_envs: int,
        segment_steps: int,
        seconds: float,
        most_seconds: float,
        episode_steps: float,
    ) -> tuple[float, float, float]:
        """Wall and processor seconds per step of a collector with this many environments, and the megabytes of each. It
        plays a whole episode of each if there is time, because the first steps may take longer than the last."""
        before = _megabytes()
        rollout = Rollout(self.factory.make(num_envs), policy, run_seed=0)
        segments = rollout.segments(segment_steps, next_from(itertools.count()))
        steps = next(segments).num_steps
        try:
            wall, cpu = per_step(segments, steps, seconds, most_seconds, num_envs * episode_steps)
            return wall, cpu, max(0.0, _megabytes() - before) / num_envs
        finally:
            rollout.close()

    def race(self, policy: Policy, segment_steps: int, seconds: float) -> float:
        """Steps per second of this worker. Several workers, asked at once, tell what the cores are worth together."""
        solo = SingleEnvRollout(self._lane, self.factory.spec, policy, run_seed=0)
        segments = solo.segments(segment_steps, next_from(itertools.count()))
        next(segments)
        return 1 / per_step(segments, segment_steps, seconds)[0]

    def infer(self, policy: Policy) -> tuple[float, float]:
        """Seconds of one decision: alone, and as part of a batch."""
        return inference_seconds(policy, self.factory.spec)


def _megabytes() -> float:
    """The memory of this process that no other process shares."""
    return psutil.Process().memory_full_info().uss / 1e6


class CoreUse(NamedTuple):
    """How a process spent its time."""

    cpu_share: float
    """The share of computing in the time that the environment had a core or slept."""
    stolen_share: float
    """The share of all the time in which the process was ready to run while others had the core."""


def core_use(
    wall: float, cpu: float, queued: float, num_sleeps: int, longest_step: float, env_seconds: float
) -> CoreUse:
    """Tell sleeping from waiting for a core that others have, in a loop that only the environment can make sleep.

    Time in which the process did not run is neither `cpu` nor, where the kernel counts it, `queued`. It was asleep for
    what is left, but no longer than its sleeps can have lasted, each of which lies within one step or reset: a virtual
    machine may lose its core without a word, and so may a process where the kernel counts no queues.
    """
    asleep = max(0.0, min(wall - cpu - queued, num_sleeps * longest_step))
    stolen_share = min(1.0, max(0.0, wall - cpu - asleep) / wall)
    # What is stolen hits the environment as often as the rest of the loop, so its own time shrinks by the same share.
    of_env = env_seconds * (1.0 - stolen_share)
    return CoreUse(1.0 - min(1.0, asleep / max(of_env, 1e-9)), stolen_share)


def _num_sleeps() -> int:
    """How often this thread has given its core away by itself, in order to sleep or to wait."""
    # ru_nvcsw counts voluntary context switches. Only Linux counts them for one thread.
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _queued_seconds() -> float:
    """Seconds so far in which this process was ready to run and had no core; 0 where the system does not count them."""
    try:
        # Its fields: nanoseconds on a core, nanoseconds in the queue for one, number of time slices.
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def per_step(
    segments: Iterator[object], steps: int, seconds: float, most_seconds: float = 0.0, enough_steps: float = 0.0
) -> tuple[float, float]:
    """Wall and processor seconds per step, measured for `seconds`, or up to `most_seconds` if the steps are too few."""
    started, used, num_steps, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
    while num_steps == 0 or elapsed < seconds or (elapsed < most_seconds and num_steps < enough_steps):
        next(segments)
        num_steps += steps
        elapsed = time.perf_counter() - started
    return elapsed / num_steps, (time.process_time() - used) / num_steps


def inference_seconds(policy: Policy, spec: EnvSpec) -> tuple[float, float]:
    """Return the seconds of one decision: alone, and as part of a batch."""
    space = spec.observation_space
    obs = np.zeros((INFERENCE_BATCH, *space.shape), space.dtype)
    noise = policy.draw(np.random.default_rng(0), INFERENCE_BATCH)
    head = np.zeros(policy.head_size, np.float32)
    act = policy.single()
    # Another observation each time, because an actor may keep what it has computed for the last ones.
    drawn = np.random.default_rng(0).integers(0, 100, (INFERENCES, *space.shape), np.uint8)
    others = itertools.cycle(drawn.astype(space.dtype))
    alone = _best_of(lambda: act(next(others), noise[0], head))
    return alone, _best_of(lambda: policy.act(obs, noise)) / INFERENCE_BATCH


def _best_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call. The fastest of three rounds counts: other programs can only make a round slower."""
    call()
    started = time.perf_counter()
    call()
    # A CNN takes as long for a batch as an MLP for a whole round.
    num_calls = max(1, min(INFERENCES // 3, int(ROUND_SECONDS / (time.perf_counter() - started))))
    found = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        found.append((time.perf_counter() - started) / num_calls)
    return min(found)


class _TimedEnv:
    """An environment with a clock around reset and step."""

    def __init__(self, lane: EnvAdapter):
        self._lane = lane
        self.first_reset_seconds: list[float] = []
        self._length = 0
        self.step_seconds: list[float] = []
        self.reset_seconds: list[float] = []
        self.episode_lengths: list[int] = []

    def forget(self) -> None:
        """Discard the times so far. The length of the running episode goes on."""
        self.first_reset_seconds = self.reset_seconds
        self.step_seconds, self.reset_seconds, self.episode_lengths = [], [], []

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        started = time.perf_counter()
        found = self._lane.reset(seed=seed)
        self.reset_seconds.append(time.perf_counter() - started)
        self._length = 0
        return found

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        started = time.perf_counter()
        found = self._lane.step(action)
        self.step_seconds.append(time.perf_counter() - started)
        self._length += 1
        if found[2] or found[3]:
            self.episode_lengths.append(self._length)
        return found

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds) + sum(self.reset_seconds)

    def is_enough(self, seconds: float, most_seconds: float) -> bool:
        num_steps, num_episodes = len(self.step_seconds), len(self.episode_lengths)
        if seconds >= most_seconds or num_steps >= MOST_STEPS:
            return True
        return seconds >= ENOUGH_SECONDS and num_steps >= ENOUGH_STEPS and num_episodes >= ENOUGH_EPISODES

    def close(self) -> None:
        self._lane.close()
