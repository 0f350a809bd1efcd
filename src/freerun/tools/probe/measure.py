"""Measures an environment, a learner and a machine before anything is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import psutil

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.adapters.noise_env import NoiseEnv
from freerun.collecting.modes.thread_trial import speed_up_by_threads
from freerun.collecting.rollouts.rollout import next_from
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.core import Algorithm, Demand, EnvSpec, Policy, Predictor, StartPoint, UserError, background_stages
from freerun.run.pool import Pool, worker_modules
from freerun.settings.config import TrainConfig
from freerun.settings.factories import env_recipe, make_algorithm
from freerun.settings.registry import find_mode
from freerun.tools.bench.load_meter import cpu_seconds
from freerun.tools.probe.env_trial import STEPS_AT_ONCE, EnvTrial, Played, per_step
from freerun.tools.probe.measurement import DEFAULT_EPISODE_STEPS, Environment, Measurement, Overhead, UpdateCost
from freerun.transport import processes

logger = logging.getLogger("freerun")

Config = TrainConfig[Any, Any]
"""The settings of a run with any algorithm and any mode."""
Configs = Mapping[str, Config]
"""By mode. They differ in nothing else."""

BUILD_SECONDS = 30.0
"""How long an environment may take to be built."""
STEP_SECONDS = 15.0
"""How long a step or a reset may take."""
PLAY_SECONDS = 5.0
"""How long the environment is played with."""
RACE_SECONDS = 0.6
RACES = 3
"""An odd number, so that one race in which the machine was disturbed is not the median."""
MOST_RACERS = 16
"""The largest number of workers in a race. The speed of further cores is extrapolated."""
VECTOR_SIZES = (16, 64)
"""Numbers of environments per collector that are measured: the defaults of `continuous` and of `batch`."""
LONGEST_VECTOR_SECONDS = 3.0
"""A vector that would take longer than this to measure is extrapolated instead."""
MOST_VECTOR_SECONDS = 2.5
SAMPLE = 2000
"""The number of step times that are kept: the predictions draw from them, and the cache stays small."""
MODE_SECONDS = 0.6
"""How long each mode collects from the stand-in."""
SLOW_STEP_SECONDS = 0.5
"""Environments slower than this are not tried out in threads: it would take too long."""
SYNC_SIZES = (1, 2, 6)
"""Numbers of environments for which a step of `sync` is measured; other numbers are interpolated."""
UPDATE_SECONDS = 1.5
ENOUGH_UPDATES = 5
MOST_UPDATE_SECONDS = 8.0
"""How long a learner may take until its second update has ended, which is the first one that counts."""


def measure(configs: Configs, say: Callable[[str], None]) -> Measurement:
    """Measure with the settings that a run would have in each of these modes."""
    started = time.perf_counter()
    config = next(iter(configs.values()))
    processes.preload([*worker_modules(config.env), "freerun.tools.probe.env_trial"])
    with contextlib.closing(EnvTrial(env_recipe(config))) as trial:
        say("building the environment")
        construct_seconds, spec, time_limit = trial.answer("building the environment", BUILD_SECONDS)
        # The policy needs the spaces alone, so that a second environment need not be built here.
        policy = make_algorithm(config, _stand_in(spec, DEFAULT_EPISODE_STEPS)).policy
        say("playing with it")
        trial.ask("play", policy, PLAY_SECONDS)
        played: Played = trial.answer("a step or a reset of the environment", PLAY_SECONDS + STEP_SECONDS)
        step_mean = float(np.mean(played.step_seconds))
        vectors: dict[str, tuple[float, float]] = {}
        episode_steps = float(np.mean(played.episode_lengths)) if played.episode_lengths else 0.0
        for num_envs in VECTOR_SIZES:
            # Each environment is built, reset and stepped at least four times: two segments of two steps.
            seconds_per_env = construct_seconds + float(np.mean(played.reset_seconds)) + 4 * step_mean
            if num_envs * seconds_per_env > LONGEST_VECTOR_SECONDS:
                continue
            trial.ask("step_vector", policy, num_envs, RACE_SECONDS, MOST_VECTOR_SECONDS, episode_steps)
            vectors[str(num_envs)] = trial.answer(f"stepping {num_envs} environments in turn", STEP_SECONDS)
        trial.ask("infer", policy)
        inference, batched = trial.answer("inference", STEP_SECONDS)
        # Workers that sleep do not compete for cores, so a race of them would tell nothing about the cores.
        computes = played.cpu_share > 0.5
        parallel_cores = _race(config, trial, policy, step_mean) if computes else float(num_cores())
    environment = Environment(
        construct_seconds,
        _sample(played.reset_seconds),
        _sample(played.step_seconds),
        played.cpu_share,
        played.loop_seconds,
        tuple(played.episode_lengths[-SAMPLE:]),
        time_limit,
        played.megabytes,
        vectors,
        speed_up_by_threads(GymnasiumFactory(*env_recipe(config))) if step_mean < SLOW_STEP_SECONDS else None,
        played.stolen_share,
    )
    length = round(environment.mean_length or DEFAULT_EPISODE_STEPS)
    stand_in = _stand_in(spec, min(length, 2000))  # they must end within the short measurements below
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
    """The number of cores that this process may use."""
    return len(processes.usable_cores())


def _sample(values: list[float]) -> tuple[float, ...]:
    """An evenly spaced sample that always contains the largest value."""
    if len(values) <= SAMPLE:
        return tuple(values)
    rows = np.linspace(0, len(values) - 1, SAMPLE).astype(int)
    return (*(values[row] for row in rows[:-1]), max(values))


def _stand_in(spec: EnvSpec, episode_steps: int) -> GymnasiumFactory:
    """An environment of noise with the same spaces, whose steps cost nothing."""
    spaces = {"observation_space": spec.observation_space, "action_space": spec.action_space}
    return GymnasiumFactory(NoiseEnv, {**spaces, "episode_steps": episode_steps})


def _race(config: Config, trial: EnvTrial, policy: Policy, step_seconds: float) -> float:
    """Return how many times as many steps per second one worker per core makes as a single worker."""
    cores = min(num_cores(), MOST_RACERS)
    if cores == 1:
        return 1.0
    # A segment takes at most a tenth of a race, so that all racers end at about the same time.
    at_once = max(1, min(STEPS_AT_ONCE, int(0.1 * RACE_SECONDS / step_seconds)))

    def race(*racers: EnvTrial) -> float:
        for racer in racers:
            racer.ask("race", policy, at_once, RACE_SECONDS / RACES)
        return sum(float(racer.answer("stepping", RACE_SECONDS + STEP_SECONDS)) for racer in racers)

    with contextlib.ExitStack() as stack:
        others = [EnvTrial(env_recipe(config)) for _ in range(cores - 1)]
        for other in others:
            stack.callback(other.close)
        for other in others:
            other.answer("building the environment", BUILD_SECONDS)
        # Both are measured in turns, because a machine that others use too changes its speed.
        ratios = [race(trial, *others) / race(trial) for _ in range(RACES)]
    # Cores that did not race count as much as those that did: ratio * all cores / racing cores.
    return min(float(num_cores()), max(1.0, statistics.median(ratios)) * num_cores() / cores)


# ---------------------------------------------------------------------------------------------- the learner


def _updates(configs: Configs, stand_in: GymnasiumFactory) -> dict[str, UpdateCost]:
    """Measure one learner for each set of algorithm settings, on steps of the stand-in. They take turns, so that a
    machine which changes its speed favours none of them."""
    # Collecting the garbage of all imports takes long: it happens here and not during one of the few updates.
    gc.collect()
    # Modes with the same algorithm settings share a learner, because their updates cost the same.
    learners: dict[Any, _TimedLearner] = {}
    for config in configs.values():
        if config.algorithm not in learners:
            learners[config.algorithm] = _TimedLearner(make_algorithm(config, stand_in), stand_in)
    unfinished = [*learners.values()]
    while unfinished:
        unfinished = [learner for learner in unfinished if learner.advance()]
    return {mode: learners[config.algorithm].result() for mode, config in configs.items()}


class _TimedLearner:
    """An algorithm that learns from the stand-in, with a clock around its updates."""

    def __init__(self, algorithm: Algorithm, stand_in: GymnasiumFactory):
        solo = SingleEnvRollout(stand_in.make_one(), stand_in.spec, algorithm.policy, run_seed=0)
        self._episodes = solo.episodes(next_from(itertools.count()))
        self._algorithm = algorithm
        self._demand = algorithm.demand()
        self._timed: list[tuple[int, float]] = []
        self._seconds = 0.0

    def advance(self) -> bool:
        """Make updates for a while; return False if there were enough of them before."""
        # The first update is not counted: it allocates memory, may compile, and may learn from more steps than others.
        num_timed = len(self._timed) - 1
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
            segment = next(self._episodes).copy()  # the rollout writes the next episode into the same arrays
            self._algorithm.observe([segment])
            num_steps += segment.num_steps
        begun = time.perf_counter()
        self._algorithm.update(len(self._timed), 0.0)
        return max(1, num_steps), time.perf_counter() - begun

    def result(self) -> UpdateCost:
        """Return the update with the median seconds per step. Stages that still run are waited for."""
        for stage in background_stages(self._algorithm).values():
            if stage.is_busy:
                stage.finish()
        timed = sorted(self._timed[1:] or self._timed, key=lambda pair: pair[1] / pair[0])
        steps, seconds = timed[(len(timed) - 1) // 2]  # one of the pairs, which a mean of two would not be
        return UpdateCost(dataclasses.asdict(self._demand), steps, seconds)


# ---------------------------------------------------------------------------------------------- the modes


def _overheads(configs: Configs, stand_in: GymnasiumFactory) -> tuple[dict[str, Overhead], dict[str, float]]:
    """What each mode costs per step, measured with real workers on the stand-in, whose own steps cost nothing."""
    found: dict[str, Overhead] = {}
    sync_seconds: dict[str, float] = {}
    loop = _loop_seconds(next(iter(configs.values())), stand_in)
    for mode, config in configs.items():
        model = find_mode(mode).traits.probe
        assert model is not None  # `auto_mode` has refused modes without one
        # One process hands nothing over, and a mode that is slow to start takes the overhead of another one.
        if model.predictor is Predictor.ALTERNATING or model.overhead_of is not None:
            continue
        if model.predictor is Predictor.LOCKSTEP:
            # Seconds per vector step = seconds per step * environments.
            sync_seconds = {str(size): _collect(config, stand_in, size)[2] * size for size in SYNC_SIZES}
            continue
        # Two workers tell what a pair of them costs the learner; other modes have the number that they are set to.
        size = 2 if model.predictor is Predictor.SCHEDULED_UNITS else config.num_workers or 1
        worker, learner, _ = _collect(config, stand_in, size)
        # What a worker takes beyond the loop without a mode is the price of handing over.
        found[mode] = Overhead(max(0.0, worker - loop), learner)
    return found, sync_seconds


def _loop_seconds(config: Config, stand_in: GymnasiumFactory) -> float:
    """Processor seconds per step of a loop over the stand-in that hands nothing over."""
    solo = SingleEnvRollout(stand_in.make_one(), stand_in.spec, make_algorithm(config, stand_in).policy, run_seed=0)
    segments = solo.segments(STEPS_AT_ONCE, next_from(itertools.count()))
    next(segments)  # the first steps allocate and are slower
    return per_step(segments, STEPS_AT_ONCE, MODE_SECONDS / 2)[1]


def _collect(config: Config, stand_in: GymnasiumFactory, num_workers: int) -> tuple[float, float, float]:
    """Per step: processor seconds of the workers and of this process, and wall seconds."""
    config = dataclasses.replace(config, num_workers=num_workers)
    algorithm = make_algorithm(config, stand_in)
    pool = Pool(stand_in)
    try:
        collector = pool.collector(config, algorithm, StartPoint())
        demand = Demand(steps=config.collector.unit_steps or 2048)
        weights = algorithm.policy.weights

        def gather(version: int) -> int:
            collector.publish(weights, version)
            return sum(segment.num_steps for segment in collector.collect(demand))

        gather(0)  # workers start, which must not count
        children = psutil.Process().children(recursive=True)
        theirs, mine, started = cpu_seconds(children), time.process_time(), time.perf_counter()
        num_steps, version = 0, 1
        while time.perf_counter() - started < MODE_SECONDS:
            num_steps += gather(version)
            version += 1
        seconds, mine = time.perf_counter() - started, time.process_time() - mine
        theirs = cpu_seconds(children) - theirs
    except UserError as error:
        logger.info("mode %s was not tried: %s", config.mode, error)
        return 0.0, 0.0, 0.0
    finally:
        pool.close()
    return theirs / num_steps, mine / num_steps, seconds / num_steps
