"""`freerun check-env`: looks for what is wrong with an environment, and says how to mend it."""

from __future__ import annotations

import copy
import math
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import cloudpickle
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from rich.text import Text

from freerun.core import EnvFailure, UserError, episode_seed
from freerun.envs.gymnasium import EnvName, make
from freerun.envs.lane import Lane
from freerun.envs.tape import (
    REPLAY_SECONDS,
    Env,
    Tape,
    difference,
    raising,
    random_actions,
    record,
    replay,
    replay_beside,
    same,
    short,
)
from freerun.transport import processes

Level = Literal["ok", "warning", "problem"]
Row = tuple[Level, str, str]
"""How good, what was found, what to do."""

SECONDS_PER_EPISODE = 2.0
MAX_STEPS = 10_000
ENDLESS_STEPS = 1_000  # an episode that is longer when time is up is taken for one that never ends
WORKER_STEPS = 20
WORKER_SECONDS = 60.0
HUGE_ACTION = 100.0
FAST_SECONDS = 100e-6
SLOW_SECONDS = 1e-3  # where steps are shorter, a few slow ones are more likely the machine's doing than their own
LOCKSTEP_ENVS = 8
UNEVEN = 1.5
FINAL_KEYS = {"final_obs", "final_observation", "terminal_observation", "final_info"}

END = "wrap it in gymnasium.wrappers.TimeLimit, or train with --max-episode-steps"
FIVE = "return obs, reward, terminated, truncated, info: the old gym's `done` is split in two"
SEED = "call super().reset(seed=seed) and draw every random number from self.np_random"
SPACES = "set self.action_space and self.observation_space in __init__"
FAULTS: dict[str, tuple[str, Level, str]] = {
    "reset": ("interface", "problem", "return obs, info from reset; an empty dict will do as info"),
    "step": ("interface", "problem", FIVE),
    "info": ("interface", "problem", "return a dict as info; an empty one will do"),
    "unreadable": ("values", "problem", "return what observation_space declares, or declare what is returned"),
    "shape": ("values", "problem", "give the observation and observation_space the same shape"),
    "finite": ("values", "problem", "look for a division by zero or an overflow; freerun refuses NaN and infinity"),
    "reward": ("values", "problem", "return the reward as one finite number: float(reward)"),
    "flag": ("values", "problem", "return bool(terminated) and bool(truncated)"),
    "outside": ("spaces", "warning", "widen the bounds of observation_space, or clip; freerun does not use them"),
}
"""What can be wrong with a single step: its topic, how bad it is, how to mend it."""
REMEDIES = {
    "unexpected keyword argument 'seed'": f"write `def reset(self, *, seed=None, options=None)`, {SEED}",
    "to unpack (expected 5": FIVE,
    "no attribute 'action_space'": SPACES,
    "no attribute 'observation_space'": SPACES,
}
"""Exceptions whose cause is known by a part of their text."""


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Level
    found: str
    advice: str = ""

    @property
    def good(self) -> bool:
        return self.level != "problem"


class Trial:
    """An environment and some episodes recorded from it with random actions: what the topics look at."""

    def __init__(self, name: EnvName, env_args: Mapping[str, Any], num_episodes: int):
        self.name, self.env_args = name, env_args
        self.envs: list[Env] = []
        started = time.perf_counter()
        self.env = self.build()
        self.construct_seconds = time.perf_counter() - started
        self.max_seconds = num_episodes * SECONDS_PER_EPISODE
        deadline = time.perf_counter() + self.max_seconds
        self.tapes: list[Tape] = []
        for seed in (episode_seed(0, number) for number in range(num_episodes)):
            seconds_left = deadline - time.perf_counter()
            if seconds_left > 0:
                self.tapes.append(record(self.env, seed, random_actions(self.env, seed), MAX_STEPS, seconds_left))
        self.first = next((tape for tape in self.tapes if tape.num_steps), self.tapes[0])
        self.ended = [tape for tape in self.tapes if tape.ended]

    def build(self) -> Env:
        self.envs.append(make(self.name, self.env_args))
        return self.envs[-1]

    def close(self) -> tuple[()]:
        for env in self.envs:
            with raising("close()"):
                env.close()
        return ()

    def faults(self, topic: str) -> Iterator[Row]:
        """The first of each kind."""
        first = {kind: found for tape in reversed(self.tapes) for kind, found in tape.faults.items()}
        for kind, found in first.items():
            of, level, advice = FAULTS[kind]
            if of == topic:
                yield level, found, advice


# ---------------------------------------------------------------------------------------------- topics
# To add one, write a function and name it in TOPICS or STEP_TOPICS. It yields a row for each thing that is not as it
# should be, and may end with an "ok" row in any case: that one is shown only where it stands alone.


def check_spaces(trial: Trial) -> Iterator[Row]:
    env = trial.env
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space")):
        return  # among the errors
    try:
        read = Lane(env).observation_space
    except UserError as error:
        found, _, advice = str(error).rpartition(": ")
        yield "problem", found, advice
        return
    if isinstance(env.action_space, spaces.Box):
        largest = float(np.abs([env.action_space.low, env.action_space.high]).max())
        if largest > HUGE_ACTION:
            size = f"reach {largest:g}" if math.isfinite(largest) else "have no bounds"
            advice = "declare Box(-1, 1) and scale inside the environment: a new policy acts within about ±1"
            yield "warning", f"actions {size}", advice
    yield from trial.faults("spaces")
    note = "" if read == env.observation_space else f", converted to {_describe(read)}"
    yield "ok", f"observations {_describe(env.observation_space)}{note}; actions {_describe(env.action_space)}", ""


def _describe(space: spaces.Space[Any]) -> str:
    return f"Box{space.shape} {space.dtype}" if isinstance(space, spaces.Box) else short(space)


def check_errors(trial: Trial) -> Iterator[Row]:
    for tape in trial.tapes:
        if tape.failure:
            again = f"to see it again: env.reset(seed={tape.seed}) and actions after env.action_space.seed({tape.seed})"
            yield "problem", tape.failure, next((REMEDIES[part] for part in REMEDIES if part in tape.failure), again)
            return
    yield "ok", f"none in {sum(tape.num_steps for tape in trial.tapes):,} steps of {len(trial.tapes)} episodes", ""


def check_interface(trial: Trial) -> Iterator[Row]:
    yield from trial.faults("interface")
    buffer = "; the same array each time, changed in place, which freerun copies" if trial.first.reuses_buffer else ""
    yield "ok", f"reset returns two values, step returns five{buffer}", ""


def check_values(trial: Trial) -> Iterator[Row]:
    yield from trial.faults("values")
    yield "ok", "no NaN, no infinity, no wrong shape or type", ""


def check_seeding(trial: Trial) -> Iterator[Row]:
    first, other_seed = trial.first, episode_seed(1, 0)
    second = trial.build()
    if differs := difference(first, replay(second, first, global_seed=1)):
        if difference(first, replay(trial.build(), first)) is None:
            found = "the episode depends on a global generator (`random` or `numpy.random`)"
        else:
            found = "the same seed and actions give another episode"
        yield "problem", f"{found}: {differs}", SEED
    elif differs := difference(first, replay(trial.env, first)):
        yield "problem", f"an episode depends on those before it: {differs}", "set everything anew in reset()"
    elif differs := difference(first, replay_beside(trial.env, other_seed, second, first)):
        found = f"two environments in one process disturb each other: {differs}"
        yield "problem", found, "keep state in self, not in the class or the module"
    elif difference(first, replay(trial.env, first, other_seed)) is None:
        yield "warning", "another seed gives the same episode", f"unless that is meant, {SEED}"
    else:
        yield "ok", "a seed decides its episode: in a new environment, in a used one, beside another one", ""


def check_endings(trial: Trial) -> Iterator[Row]:
    lengths = sorted(tape.num_steps for tape in trial.ended)
    longest = max((tape.num_steps for tape in trial.tapes if not tape.ended and not tape.failure), default=0)
    limit = trial.env.spec.max_episode_steps if trial.env.spec else None
    num_terminated = sum(tape.results[-1][1] for tape in trial.ended)
    if lengths and longest >= MAX_STEPS:
        yield "warning", f"an episode had not ended after {longest:,} steps", END
    elif len(lengths) > 1 and 1 < lengths[0] == lengths[-1] and num_terminated == len(lengths):
        found = f"every episode was terminated after exactly {lengths[0]} steps, which looks like a time limit"
        advice = "return truncated=True at a time limit, so that the value of the last state is bootstrapped"
        yield "warning", found, advice
    elif lengths:
        steps = f"{lengths[0]} steps" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]} steps"
        yield "ok", f"episodes of {steps}; {num_terminated} terminated, {len(lengths) - num_terminated} truncated", ""
    elif limit and limit > longest > 0:
        yield "ok", f"none within {longest:,} steps, but a TimeLimit ends episodes after {limit:,}", ""
    elif longest >= ENDLESS_STEPS:
        yield "problem", f"no episode ended within {longest:,} steps", END
    elif longest:
        found = f"no episode ended within {longest:,} steps, which took the {trial.max_seconds:g} s of this check"
        yield "warning", found, f"more --episodes give it more time; if it never ends, {END}"


def check_autoreset(trial: Trial) -> Iterator[Row]:
    advice = "return the last observation of the episode: its value is needed at a truncation; freerun does the resets"
    keys = {key for tape in trial.ended for key in tape.last_info} & FINAL_KEYS
    moving = [tape for tape in trial.ended if not all(same(obs, tape.last_obs) for obs in tape.obs[1:])]
    starts = [tape.obs[0] for tape in trial.tapes if tape.obs]
    if keys:
        yield "problem", f"the environment resets itself: info holds {', '.join(sorted(keys))}", advice
    elif moving and _resets_in_step(trial.env, min(moving, key=lambda tape: tape.num_steps)):
        yield "problem", "step() calls reset() and returns the first observation of the next episode", advice
    elif moving and all(same(tape.last_obs, start) for tape in moving for start in starts):
        yield "warning", "the last observation is always the first one of the next", f"if it resets itself, {advice}"
    elif trial.ended:
        yield "ok", "the last observation of an episode is its own", ""


def _resets_in_step(env: Env, tape: Tape) -> bool:
    """Whether the bare environment calls its own reset in the last step and returns what it got."""
    bare, reset = env.unwrapped, env.unwrapped.reset
    starts = []

    def spy(*args: Any, **options: Any) -> Any:
        start = reset(*args, **options)
        starts.append(copy.deepcopy(start))
        return start

    bare.reset = spy  # type: ignore[method-assign]
    try:
        again = record(env, tape.seed, tape.actions, tape.num_steps, max_seconds=2 * sum(tape.step_seconds) + 1)
    finally:
        bare.reset = reset  # type: ignore[method-assign]
    return len(starts) > 1 and same(starts[-1][0], again.last_obs)


def check_workers(trial: Trial) -> Iterator[Row]:
    first = trial.first
    order = (trial.name, dict(trial.env_args), first.seed, first.actions[: min(first.num_steps, WORKER_STEPS)])
    try:
        with raising("pickling the factory"):
            packed = cloudpickle.dumps(order)
    except EnvFailure as failure:
        advice = "open files, locks and connections inside the environment's __init__, or name it as module:callable"
        yield "problem", str(failure), advice
        return
    problem, obs = _ask_worker(packed)
    if problem:
        advice = "what it needs must be importable and free to use in a new process (an id: module:Name-v0)"
        yield "problem", problem, advice
    elif same(obs, first.obs[:1]):
        yield "ok", "built and stepped in a worker process, with the same first observation", ""
    elif same(record(trial.env, first.seed, (), 0, REPLAY_SECONDS).last_obs, first.obs[0]):
        advice = (
            "look for what differs between processes: the order of a set of strings, id(), the clock, the process id"
        )
        yield "problem", "in a worker, the same seed gives another first observation", advice
    else:
        yield "ok", "built and stepped in a worker process", ""  # that the seed does not decide is said above


def _ask_worker(packed: bytes) -> tuple[str | None, Any]:
    """What went wrong there, and the first observation."""
    ours, theirs = processes.context().Pipe()
    process = processes.start(_work, theirs, packed)
    theirs.close()
    try:
        if ours.poll(WORKER_SECONDS):
            return ours.recv()  # type: ignore[no-any-return]
        return f"a worker did not answer within {WORKER_SECONDS:g} s", None
    except (EOFError, ConnectionResetError):
        process.join()
        return f"a worker died with exit code {process.exitcode}", None
    finally:
        ours.close()
        processes.stop([process], grace_seconds=1.0)


def _work(connection: Connection, packed: bytes) -> None:
    processes.enter_worker()
    try:
        with raising("in a worker, building the environment"):
            name, env_args, seed, actions = pickle.loads(packed)
            env = make(name, env_args)
        tape = record(env, seed, actions, WORKER_STEPS, REPLAY_SECONDS)
        connection.send((f"in a worker, {tape.failure}" if tape.failure else None, tape.obs[:1]))
    except (EnvFailure, UserError) as failure:
        connection.send((str(failure), None))


def check_step_times(trial: Trial) -> Iterator[Row]:
    seconds = np.sort(np.concatenate([tape.step_seconds for tape in trial.tapes]))
    mean, slowest = float(seconds.mean()), float(seconds[-1])
    p50, p95, p99 = (_duration(value) for value in np.percentile(seconds, (50, 95, 99)).tolist())
    resets = float(np.mean([tape.reset_seconds for tape in trial.tapes]))
    found = (
        f"step {_duration(mean)} on average (p50 {p50}, p95 {p95}, p99 {p99}, max {_duration(slowest)} = "
        f"{slowest / mean:.1f} × mean); reset {_duration(resets)}; construction {_duration(trial.construct_seconds)}"
    )
    # The mean of the slowest of n: the k-th of m sorted times is the slowest with probability (k/m)^n - ((k-1)/m)^n.
    chances = np.diff((np.arange(len(seconds) + 1) / len(seconds)) ** LOCKSTEP_ENVS)
    lockstep = float(chances @ seconds) / mean
    if mean < FAST_SECONDS:
        advice = "fast: --mode sequential or a few workers will do; more processes cost more than they bring"
    elif mean < SLOW_SECONDS or lockstep < UNEVEN:
        advice = "slow enough to be worth worker processes: --mode pipes"
    else:
        advice = (
            f"slow and uneven: --mode pipes --max-lag 1. With --mode sync, {LOCKSTEP_ENVS} environments would wait "
            f"for the slowest at each step: {lockstep:.1f} × the mean"
        )
    yield "ok", found, advice


def _duration(seconds: float) -> str:
    unit, scale = next((row for row in (("s", 1.0), ("ms", 1e-3)) if seconds >= row[1]), ("µs", 1e-6))
    return f"{seconds / scale:.3g} {unit}"


Topic = Callable[[Trial], Iterable[Row]]
TOPICS: dict[str, Topic] = {
    "spaces": check_spaces,
    "errors": check_errors,
    "interface": check_interface,
    "values": check_values,
}
STEP_TOPICS: dict[str, Topic] = {
    "seeding": check_seeding,
    "endings": check_endings,
    "autoreset": check_autoreset,
    "workers": check_workers,
    "step times": check_step_times,
}
"""Those that make sense only where at least one step succeeded."""


# ---------------------------------------------------------------------------------------------- the check


def check(env: EnvName, env_args: Mapping[str, Any], num_episodes: int = 3) -> list[Finding]:
    """Try an environment; one that cannot even be built raises, as it does in training."""
    if num_episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {num_episodes}")
    states = random.getstate(), np.random.get_state()
    try:
        trial = Trial(env, env_args, num_episodes)
        has_steps = any(tape.num_steps for tape in trial.tapes)
        topics = {**TOPICS, **(STEP_TOPICS if has_steps else {}), "closing": Trial.close}
        findings = [finding for name, topic in topics.items() for finding in _examine(name, topic, trial)]
        return [finding for finding in findings if has_steps or finding.level != "ok"]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _examine(name: str, topic: Topic, trial: Trial) -> list[Finding]:
    try:
        findings = [Finding(name, *row) for row in topic(trial)]
    except (EnvFailure, UserError) as failure:
        return [Finding(name, "problem", str(failure), "mend what the last line says")]
    return [finding for finding in findings if finding.level != "ok"] or findings


MARKS: dict[Level, tuple[str, str]] = {"ok": ("✔", "green"), "warning": ("!", "yellow"), "problem": ("✘", "red")}


def print_report(env: EnvName, findings: Sequence[Finding], console: Console) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        mark, colour = MARKS[finding.level]
        table.add_row(Text(mark, colour), Text(finding.topic, "bold", no_wrap=True), Text(finding.found))
        if finding.advice:
            table.add_row("", "", Text(f"→ {finding.advice}", "dim" if finding.level == "ok" else colour))
    console.print(Text(str(env), "bold"))
    console.print(table)
    num_problems, num_warnings = (
        sum(finding.level == level for finding in findings) for level in ("problem", "warning")
    )
    summary = f"{num_problems} to mend (✘), {num_warnings} to look at (!)."
    console.print(summary if num_problems or num_warnings else "All good.")
