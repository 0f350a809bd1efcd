"""Measures an environment, a learner and a machine before anything is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.adapters.noise_env import NoiseEnv
from freerun.collecting.modes.thread_trial import speed_up_by_threads
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.workers.worker import make_rollout
from freerun.core import Demand, EnvSpec, Policy, Predictor, StartPoint, UserError
from freerun.run.pool import Pool, worker_modules
from freerun.settings.config import TrainConfig
from freerun.settings.factories import env_recipe, make_algorithm
from freerun.settings.registry import find_mode
from freerun.tools.bench.load_meter import cpu_seconds
from freerun.tools.probe.candidates import MachineLimits, Search, envs_per_worker_of, unit_steps_of, with_settings
from freerun.tools.probe.env_trial import STEPS_AT_ONCE, EnvTrial, Played, per_step
from freerun.tools.probe.measurement import DEFAULT_EPISODE_STEPS, Environment, Measurement, Overhead
from freerun.tools.probe.update_costs import sizes_to_time, time_updates
from freerun.transport import processes
from freerun.transport.slots import bytes_per_step

logger = logging.getLogger("freerun")

Config = TrainConfig[Any, Any]
"""The settings of a run with any algorithm and any mode."""

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
VECTOR_SIZES = (4, 16, 64)
"""Numbers of environments per worker that are measured; the others are interpolated. The last two are the defaults of
`continuous` and of `batch`."""
LONGEST_VECTOR_SECONDS = 3.0
"""A vector that would take longer than this to measure is extrapolated instead."""
MOST_VECTOR_SECONDS = 2.5
VECTOR_SEGMENT_STEPS, VECTOR_SEGMENT_SECONDS = 32, 0.1
"""Steps of each environment in one segment of such a vector, and how long such a segment may take."""
SAMPLE = 2000
"""The number of step times that are kept: the predictions draw from them, and the cache stays small."""
MODE_SECONDS = 0.6
"""How long each mode collects from the stand-in."""
SLOW_STEP_SECONDS = 0.5
"""Environments slower than this are not tried out in threads: it would take too long."""
SYNC_SIZES = (1, 2, 6)
"""Numbers of environments for which a step of `sync` is measured; other numbers are interpolated."""
UPDATE_SECONDS = 1.5
"""How long each learner updates."""
SEGMENT_TRIAL = {"envs_per_worker": 16, "segment_steps": 32}
"""The units with which modes that may hand over segments are measured, besides whole episodes."""


def measure(search: Search, say: Callable[[str], None]) -> Measurement:
    """Measure what predicts all candidates, with the settings that a run would have in each of these modes."""
    started = time.perf_counter()
    configs = search.completed()
    config = next(iter(configs.values()))
    processes.preload([*worker_modules(config.env), "freerun.tools.probe.env_trial"])
    with contextlib.closing(EnvTrial(env_recipe(config))) as trial:
        say("building the environment")
        construct_seconds, spec, time_limit = trial.answer("building the environment", BUILD_SECONDS)
        # The policy needs the spaces alone, so that a second environment need not be built here.
        algorithm = make_algorithm(config, stand_in_for(spec, DEFAULT_EPISODE_STEPS))
        policy, update_steps = algorithm.policy, algorithm.demand().steps
        say("playing with it")
        trial.ask("play", policy, PLAY_SECONDS)
        played: Played = trial.answer("a step or a reset of the environment", PLAY_SECONDS + STEP_SECONDS)
        step_mean = float(np.mean(played.step_seconds))
        vectors: dict[str, tuple[float, float]] = {}
        megabytes_per_env = played.megabytes  # a guess, for environments that are too slow to be measured together
        episode_steps = float(np.mean(played.episode_lengths)) if played.episode_lengths else 0.0
        for num_envs in VECTOR_SIZES:
            # Each environment is built, reset and stepped at least four times: two segments of two steps.
            seconds_per_env = construct_seconds + float(np.mean(played.reset_seconds)) + 4 * step_mean
            if num_envs * seconds_per_env > LONGEST_VECTOR_SECONDS:
                continue
            at_once = max(2, min(VECTOR_SEGMENT_STEPS, int(VECTOR_SEGMENT_SECONDS / (num_envs * step_mean))))
            trial.ask("step_vector", policy, num_envs, at_once, RACE_SECONDS, MOST_VECTOR_SECONDS, episode_steps)
            wall, cpu, megabytes_per_env = trial.answer(f"stepping {num_envs} environments in turn", STEP_SECONDS)
            vectors[str(num_envs)] = wall, cpu
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
        megabytes_per_env,
        bytes_per_step(1, spec),
        played.cpu_seconds,
    )
    # Its episodes must end within the short measurements below.
    length = min(round(environment.mean_length or DEFAULT_EPISODE_STEPS), 2000)
    stand_in = stand_in_for(spec, length)
    say("learning")
    available_megabytes = psutil.virtual_memory().available / 1e6
    limits = MachineLimits(environment, num_cores(), available_megabytes, update_steps)
    completed = [*configs.values(), *(candidate.config for candidate in search.candidates(limits))]
    updates = time_updates(sizes_to_time(completed), stand_in, UPDATE_SECONDS)
    say("collecting in each mode")
    overheads, sync_seconds = _overheads(search, stand_in, length)
    return Measurement(
        environment,
        num_cores(),
        parallel_cores,
        inference,
        batched,
        updates,
        overheads,
        sync_seconds,
        available_megabytes,
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


def stand_in_for(spec: EnvSpec, episode_steps: int) -> GymnasiumFactory:
    """An environment of noise with the same spaces, whose steps cost nothing."""
    spaces = {"observation_space": spec.observation_space, "action_space": spec.action_space}
    return GymnasiumFactory(NoiseEnv, {**spaces, "episode_steps": episode_steps}).with_parts_of(spec)


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


# ---------------------------------------------------------------------------------------------- the modes


def _overheads(
    search: Search, stand_in: GymnasiumFactory, episode_steps: int
) -> tuple[dict[str, tuple[Overhead, ...]], dict[str, float]]:
    """What each mode costs per step, measured with real workers on the stand-in, whose own steps cost nothing."""
    found: dict[str, tuple[Overhead, ...]] = {}
    sync_seconds: dict[str, float] = {}
    loops: dict[int, float] = {}
    for mode, config in search.completed().items():
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
        trials = [config]
        if {*SEGMENT_TRIAL} <= {*search.open_settings(mode)}:
            trials.append(with_settings(config, SEGMENT_TRIAL))
        costs = []
        for trial in trials:
            num_envs = envs_per_worker_of(trial)
            if num_envs not in loops:
                loops[num_envs] = _loop_seconds(trial, stand_in, num_envs)
            worker, learner, _ = _collect(trial, stand_in, size)
            # What a worker takes beyond the loop without a mode is the price of handing over.
            costs.append(Overhead(max(0.0, worker - loops[num_envs]), learner, unit_steps_of(trial, episode_steps)))
        found[mode] = tuple(costs)
    return found, sync_seconds


def _loop_seconds(config: Config, stand_in: GymnasiumFactory, num_envs: int) -> float:
    """Processor seconds per step of a loop over stand-ins that hands nothing over."""
    policy = make_algorithm(config, stand_in).policy
    rollout = make_rollout(stand_in, policy, run_seed=0, num_envs=num_envs)
    at_once = max(1, STEPS_AT_ONCE // num_envs)
    segments = rollout.segments(at_once, next_from(itertools.count()))
    next(segments)  # the first steps allocate and are slower
    return per_step(segments, at_once * num_envs, MODE_SECONDS / 2)[1]


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
