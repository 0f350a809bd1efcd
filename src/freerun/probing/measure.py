"""What there is to know of an environment, a learner and a machine, before anything is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from freerun.collectors.rollout import in_order
from freerun.collectors.solo import Solo
from freerun.collectors.threads import speed_up_by_threads
from freerun.config import TrainConfig
from freerun.core import Algorithm, Demand, EnvSpec, Start, UserError
from freerun.envs.gymnasium import GymnasiumFactory
from freerun.envs.stand_in import StandIn
from freerun.making import env_recipe, make_algorithm
from freerun.pool import Pool, worker_modules
from freerun.probing.trial import STEPS_AT_ONCE, Trial, per_step
from freerun.transport import processes

logger = logging.getLogger("freerun")

BUILD_SECONDS = 30.0
"""How long an environment may take to be built."""
STEP_SECONDS = 15.0
"""How long a step or a reset may take."""
PLAY_SECONDS = 5.0
RACE_SECONDS = 0.6
RACES = 3
MOST_RACERS = 16
LANES = (16, 64)
"""Environments of a collector: what `continuous` and `batch` give theirs if nothing else is said."""
LANES_SECONDS = 3.0
"""What is slower than this is worked out instead of measured."""
MOST_LANES_SECONDS = 2.5
SAMPLE = 2000
DEFAULT_EPISODE_STEPS = 200
"""Of the stand-in, where no episode has ended."""
MODE_SECONDS = 0.6
SLOW_STEP_SECONDS = 0.5
"""Environments slower than this are not tried out in threads: it would take too long."""
SYNC_SIZES = (1, 2, 6)
UPDATE_SECONDS = 1.5
ENOUGH_UPDATES = 5
MOST_UPDATE_SECONDS = 8.0


@dataclass(frozen=True)
class Environment:
    construct_seconds: float
    reset_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    """A sample, in the order it came."""
    cpu_share: float
    """Processor time over time, while the environment steps and resets: 1 computes, 0 sleeps or waits."""
    loop_seconds: float
    """What a worker takes for a step around the environment's: inference, and keeping what happened."""
    episode_lengths: tuple[int, ...]
    time_limit: int | None
    megabytes: float
    """Memory of a worker's own."""
    lanes: dict[str, tuple[float, float]]
    """Of a collector with so many environments, more than one: wall and processor seconds per step, with inference
    and resets."""
    threads_speed_up: float | None
    """Steps per second of two threads over those of one: 1 if steps hold Python's lock."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of episodes; empty where none has ended and none need."""
        return self.episode_lengths or ((self.time_limit,) if self.time_limit else ())

    @property
    def mean_length(self) -> float | None:
        return float(np.mean(self.lengths)) if self.lengths else None

    @property
    def seconds_per_step(self) -> float:
        """Mean, with its share of the resets."""
        resets = float(np.mean(self.reset_seconds)) if self.reset_seconds else 0.0
        return float(np.mean(self.step_seconds)) + resets / (self.mean_length or DEFAULT_EPISODE_STEPS)


@dataclass(frozen=True)
class Update:
    """An update of an algorithm, on the device at hand."""

    demand: dict[str, Any]
    steps: int
    seconds: float


@dataclass(frozen=True)
class Overhead:
    """Processor seconds per step that a mode takes for handing over: in a worker, and in the learner's process."""

    worker: float
    learner: float


@dataclass(frozen=True)
class Measurement:
    environment: Environment
    cores: int
    parallel_cores: float
    """What all cores are worth at once, as workers step: less than their number where they share a clock or a cache."""
    inference_seconds: float
    batched_inference_seconds: float
    """Per environment, in a batch of 64."""
    updates: dict[str, Update]
    """By mode."""
    overheads: dict[str, Overhead]
    sync_seconds: dict[str, float]
    """Of a step of so many environments at once, besides theirs."""
    available_megabytes: float
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Measurement:
        """The reverse; TypeError or KeyError where it is none."""
        env = dict(found["environment"])
        for name in ("reset_seconds", "step_seconds", "episode_lengths"):
            env[name] = tuple(env[name])
        env["lanes"] = {size: tuple(pair) for size, pair in env["lanes"].items()}
        return cls(
            **{
                **found,
                "environment": Environment(**env),
                "updates": {mode: Update(**update) for mode, update in found["updates"].items()},
                "overheads": {mode: Overhead(**cost) for mode, cost in found["overheads"].items()},
            }
        )


def measure(configs: Mapping[str, TrainConfig[Any, Any]], say: Callable[[str], None]) -> Measurement:
    """With the settings that a run would have in each of these modes; they differ in nothing else."""
    started = time.perf_counter()
    config = next(iter(configs.values()))
    processes.preload([*worker_modules(config.env), "freerun.probing.trial"])
    with contextlib.closing(Trial(env_recipe(config))) as trial:
        say("building the environment")
        construct_seconds, spec, time_limit = trial.answer("building the environment", BUILD_SECONDS)
        stand_in = GymnasiumFactory(StandIn, _stand_in_args(spec, DEFAULT_EPISODE_STEPS))
        policy = make_algorithm(config, stand_in).policy
        say("playing with it")
        trial.ask("play", policy, PLAY_SECONDS)
        played = trial.answer("a step or a reset of the environment", PLAY_SECONDS + STEP_SECONDS)
        step_mean = float(np.mean(played["step_seconds"]))
        lanes: dict[str, tuple[float, float]] = {}
        episode_steps = float(np.mean(played["episode_lengths"])) if played["episode_lengths"] else 0.0
        for num_envs in LANES:
            steps_seconds = 4 * num_envs * step_mean
            if (
                num_envs * construct_seconds + steps_seconds + num_envs * np.mean(played["reset_seconds"])
                > LANES_SECONDS
            ):
                continue
            trial.ask("lanes", policy, num_envs, RACE_SECONDS, MOST_LANES_SECONDS, episode_steps)
            lanes[str(num_envs)] = trial.answer(f"stepping {num_envs} environments in turn", STEP_SECONDS)
        trial.ask("infer", policy)
        inference, batched = trial.answer("inference", STEP_SECONDS)
        computes = played["cpu_share"] > 0.5
        parallel_cores = _race(config, trial, policy, step_mean) if computes else float(num_cores())
    environment = Environment(
        construct_seconds,
        _sample(played["reset_seconds"]),
        _sample(played["step_seconds"]),
        played["cpu_share"],
        played["loop_seconds"],
        tuple(played["episode_lengths"][-SAMPLE:]),
        time_limit,
        played["megabytes"],
        lanes,
        _threads(config) if step_mean < SLOW_STEP_SECONDS else None,
    )
    length = round(environment.mean_length or DEFAULT_EPISODE_STEPS)
    stand_in = GymnasiumFactory(StandIn, _stand_in_args(spec, min(length, 2000)))
    say("learning")
    updates = _updates(configs, stand_in)
    say("collecting in each mode")
    overheads, sync_seconds = _overheads(configs, stand_in)
    return Measurement(
        environment,
        num_cores(),
        parallel_cores,
        inference,
        batched,
        updates,
        overheads,
        sync_seconds,
        psutil.virtual_memory().available / 1e6,
        time.perf_counter() - started,
    )


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sample(values: list[float]) -> tuple[float, ...]:
    """Evenly from all of them; the largest is always there."""
    if len(values) <= SAMPLE:
        return tuple(values)
    rows = np.linspace(0, len(values) - 1, SAMPLE).astype(int)
    return (*(values[row] for row in rows[:-1]), max(values))


def _stand_in_args(spec: EnvSpec, episode_steps: int) -> dict[str, Any]:
    return {
        "observation_space": spec.observation_space,
        "action_space": spec.action_space,
        "episode_steps": episode_steps,
    }


def _race(config: TrainConfig[Any, Any], trial: Trial, policy: Any, step_seconds: float) -> float:
    """How many times the steps of one worker as many as there are cores get done."""
    cores = min(num_cores(), MOST_RACERS)
    if cores == 1:
        return 1.0
    at_once = max(1, min(STEPS_AT_ONCE, int(0.1 * RACE_SECONDS / step_seconds)))

    def race(*racers: Trial) -> float:
        for racer in racers:
            racer.ask("race", policy, at_once, RACE_SECONDS / RACES)
        return sum(float(racer.answer("stepping", RACE_SECONDS + STEP_SECONDS)) for racer in racers)

    with contextlib.ExitStack() as stack:
        others = [Trial(env_recipe(config)) for _ in range(cores - 1)]
        for other in others:
            stack.callback(other.close)
        for other in others:
            other.answer("building the environment", BUILD_SECONDS)
        # In turns, for a machine that others use too changes its speed.
        ratios = [race(trial, *others) / race(trial) for _ in range(RACES)]
    return min(float(num_cores()), max(1.0, statistics.median(ratios)) * num_cores() / cores)


def _threads(config: TrainConfig[Any, Any]) -> float | None:
    return speed_up_by_threads(GymnasiumFactory(*env_recipe(config)))


# ---------------------------------------------------------------------------------------------- the learner


def _updates(configs: Mapping[str, TrainConfig[Any, Any]], stand_in: GymnasiumFactory) -> dict[str, Update]:
    """One for each way that modes set the algorithm, on steps of the stand-in. They take turns, so that a machine which
    changes its speed does not favour one of them."""
    gc.collect()  # all that was imported: once here rather than in the middle of one of few updates
    learners: dict[Any, _Learner] = {}
    for config in configs.values():
        if config.algorithm not in learners:
            learners[config.algorithm] = _Learner(make_algorithm(config, stand_in), stand_in)
    unfinished = [*learners.values()]
    while unfinished:
        unfinished = [learner for learner in unfinished if learner.advance()]
    return {mode: learners[config.algorithm].result() for mode, config in configs.items()}


class _Learner:
    """An algorithm that learns from the stand-in, with a clock around its updates."""

    def __init__(self, algorithm: Algorithm, stand_in: GymnasiumFactory):
        solo = Solo(stand_in.make_lane(), stand_in.spec, algorithm.policy, run_seed=0)
        self._episodes = solo.episodes(in_order(itertools.count()))
        self._algorithm = algorithm
        self._demand = algorithm.demand()
        self._timed: list[tuple[int, float]] = []
        self._seconds = 0.0

    def advance(self) -> bool:
        """Make updates for a while; False if they were enough before."""
        num_timed = len(self._timed) - 1  # the first one allocates, compiles, and learns from all before it may learn
        most_seconds = UPDATE_SECONDS if num_timed > 0 else MOST_UPDATE_SECONDS
        if num_timed >= ENOUGH_UPDATES or self._seconds > most_seconds:
            return False
        turn = 0.0
        while turn < UPDATE_SECONDS / ENOUGH_UPDATES:
            begun = time.perf_counter()
            self._timed.append(self._update())
            turn += time.perf_counter() - begun
        self._seconds += turn
        return True

    def _update(self) -> tuple[int, float]:
        num_steps, self._demand = 0, self._algorithm.demand()
        while self._algorithm.demand():
            segment = next(self._episodes).copy()
            self._algorithm.observe([segment])
            num_steps += segment.num_steps
        begun = time.perf_counter()
        self._algorithm.update(len(self._timed), 0.0)
        return max(1, num_steps), time.perf_counter() - begun

    def result(self) -> Update:
        """The median; and whatever is still under way is waited for."""
        for stage in getattr(self._algorithm, "stages", {}).values():
            if stage.is_busy:
                stage.finish()
        timed = sorted(self._timed[1:] or self._timed, key=lambda pair: pair[1] / pair[0])
        steps, seconds = timed[(len(timed) - 1) // 2]
        return Update(dataclasses.asdict(self._demand), steps, seconds)


# ---------------------------------------------------------------------------------------------- the modes


def _overheads(
    configs: Mapping[str, TrainConfig[Any, Any]], stand_in: GymnasiumFactory
) -> tuple[dict[str, Overhead], dict[str, float]]:
    """What each mode takes for a step of the stand-in, which takes nothing: the real workers, for a moment."""
    found: dict[str, Overhead] = {}
    sync_seconds: dict[str, float] = {}
    loop = _loop_seconds(next(iter(configs.values())), stand_in)
    for mode, config in configs.items():
        if mode in ("sequential", "ray"):
            continue
        if mode == "sync":
            sync_seconds = {str(size): _collect(config, stand_in, size)[2] * size for size in SYNC_SIZES}
            continue
        size = {"batch": 1, "continuous": config.num_workers or 1}.get(mode, 2)
        worker, learner, _ = _collect(config, stand_in, size)
        found[mode] = Overhead(max(0.0, worker - loop), learner)
    return found, sync_seconds


def _loop_seconds(config: TrainConfig[Any, Any], stand_in: GymnasiumFactory) -> float:
    """Processor seconds per step of the stand-in where nothing is handed over."""
    solo = Solo(stand_in.make_lane(), stand_in.spec, make_algorithm(config, stand_in).policy, run_seed=0)
    segments = solo.segments(STEPS_AT_ONCE, in_order(itertools.count()))
    next(segments)
    return per_step(segments, STEPS_AT_ONCE, MODE_SECONDS / 2)[1]


def _collect(config: TrainConfig[Any, Any], stand_in: GymnasiumFactory, num_workers: int) -> tuple[float, float, float]:
    """Processor seconds of workers and of this process, and seconds, per step."""
    config = dataclasses.replace(config, num_workers=num_workers)
    algorithm = make_algorithm(config, stand_in)
    pool = Pool(stand_in)
    try:
        collector = pool.collector(config, algorithm, Start())
        demand = Demand(steps=config.collector.unit_steps or 2048)
        weights = algorithm.policy.weights

        def gather(version: int) -> int:
            collector.publish(weights, version)
            return sum(segment.num_steps for segment in collector.collect(demand))

        gather(0)
        children = psutil.Process().children(recursive=True)
        theirs, mine, started = _cpu_seconds(children), time.process_time(), time.perf_counter()
        num_steps, version = 0, 1
        while time.perf_counter() - started < MODE_SECONDS:
            num_steps += gather(version)
            version += 1
        seconds, mine = time.perf_counter() - started, time.process_time() - mine
        theirs = _cpu_seconds(children) - theirs
    except UserError as error:
        logger.info("mode %s was not tried: %s", config.mode, error)
        return 0.0, 0.0, 0.0
    finally:
        pool.close()
    return theirs / num_steps, mine / num_steps, seconds / num_steps


def _cpu_seconds(children: list[psutil.Process]) -> float:
    total = 0.0
    for child in children:
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total
