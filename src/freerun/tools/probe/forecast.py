"""Predicts the speed of every mode from what was measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freerun.collecting.modes.continuous import THREADS_PAY_OFF
from freerun.core import Demand, Predictor, ProbeModel
from freerun.settings.registry import find_mode
from freerun.tools.probe.measure import Config, Configs
from freerun.tools.probe.measurement import Environment, Measurement, Overhead
from freerun.tools.probe.predict import (
    FEWEST_EPISODES_DRAWN,
    Learning,
    Rate,
    Work,
    expected_max,
    never_waiting,
    play_in_step,
    play_rounds,
)

WAITS_BELOW = 0.5
"""An environment that uses less than this share of a core while it steps leaves the core to other workers."""
CROWDS = (10, 25, 50, 100)
"""Numbers of workers for environments that wait."""
MEMORY_SHARE = 0.5
"""The share of the memory that is free now which workers may fill."""
CONTINUOUS_COLLECTORS = (1, 2, 4, 8, 16)
"""Numbers of collectors of `continuous`, as far as they divide its number of environments."""


@dataclass(frozen=True)
class Forecast:
    """The predicted speed of a mode; None and a note where it could not train."""

    mode: str
    num_workers: int
    steps_per_second: float | None
    episodes_per_second: float | None = None
    learner_busy: float | None = None
    """The share of the time in which the learner would update."""
    note: str = ""


def forecast(measured: Measurement, configs: Configs, counts: Sequence[int] = ()) -> list[Forecast]:
    """Predict every mode for these numbers of workers, or for a few that suit the machine."""
    return [
        _forecast(measured, mode, config, num_workers)
        for mode, config in configs.items()
        for num_workers in _counts(measured, mode, config, counts)
    ]


def worker_counts(measured: Measurement) -> list[int]:
    """Numbers of workers to predict for, as far as the memory holds them."""
    cores = measured.cores
    counts = {1, 2, cores, 2 * cores}
    if measured.environment.cpu_share < WAITS_BELOW:
        counts |= {4 * cores, *CROWDS}
    room = max(1, int(MEMORY_SHARE * measured.available_megabytes / max(1.0, measured.environment.megabytes)))
    return sorted(count for count in counts if count <= room)


def _counts(measured: Measurement, mode: str, config: Config, counts: Sequence[int]) -> list[int]:
    if find_mode(mode).traits.workers_flag is None:
        return [1]
    if _model(mode).predictor is Predictor.DROPPING_QUEUE:
        if config.collector.num_collectors is not None:
            return [config.collector.num_workers]
        return [count for count in CONTINUOUS_COLLECTORS if config.collector.num_envs % count == 0]
    return list(counts) or worker_counts(measured)


def _forecast(measured: Measurement, mode: str, config: Config, num_workers: int) -> Forecast:
    env, traits = measured.environment, find_mode(mode).traits
    in_segments = not traits.whole_episodes or bool(config.collector.segment_steps)
    # A mode that takes turns can also hand over part of an episode, if the algorithm lets it.
    waits_for_end = not in_segments and (measured.updates[mode].demand["whole_episodes"] or not traits.takes_turns)
    if waits_for_end and not env.lengths:
        return Forecast(mode, num_workers, None, note="waits for whole episodes, and none has ended")
    rate = _PREDICTORS[_model(mode).predictor](measured, mode, config, num_workers)
    episodes = rate.steps_per_second / env.mean_length if env.mean_length else None
    return Forecast(mode, num_workers, rate.steps_per_second, episodes, rate.learner_busy)


def _model(mode: str) -> ProbeModel:
    model = find_mode(mode).traits.probe
    assert model is not None  # `auto_mode` has refused modes without one
    return model


def _overhead(measured: Measurement, mode: str) -> Overhead:
    model = _model(mode)
    found = measured.overheads.get(model.overhead_of or mode) or Overhead(0.0, 0.0)
    # A unit is taken for an episode here.
    units_per_step = 1 / (measured.environment.mean_length or 1.0)
    return Overhead(
        found.worker + units_per_step * model.worker_seconds_per_unit,
        found.learner + units_per_step * model.learner_seconds_per_unit,
    )


def _learning(measured: Measurement, mode: str) -> Learning:
    update = measured.updates[mode]
    return Learning(Demand(**update.demand), update.seconds / update.steps + _overhead(measured, mode).learner)


def vector_seconds(env: Environment, num_envs: int) -> tuple[float, float]:
    """Wall and processor seconds per step of a collector with this many environments, without handing over."""
    alone = env.seconds_per_step + env.loop_seconds, env.cpu_share * env.seconds_per_step + env.loop_seconds
    known = {1: alone, **{int(size): pair for size, pair in env.vectors.items()}}
    sizes = sorted(known)
    # A step of all n environments takes a + b * n seconds, so the time per step, a / n + b, is linear in 1 / n.
    wall, cpu = (
        float(np.interp(-1 / num_envs, [-1 / size for size in sizes], [known[size][part] for size in sizes]))
        for part in (0, 1)
    )
    return wall, cpu


def line(known: Mapping[str, float], size: int) -> float:
    """Interpolate between the known points, and extrapolate beyond the last."""
    # JSON has no numbers as keys. The sizes were measured in rising order.
    sizes, values = [int(key) for key in known], list(known.values())
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, values))
    slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
    return values[-1] + slope * (size - sizes[-1])


# ---------------------------------------------------------------------------------------------- a model for each mode


def _sequential(measured: Measurement, mode: str, config: Config, num_workers: int) -> Rate:
    learn = _learning(measured, mode).seconds_per_step
    collect, _ = vector_seconds(measured.environment, 1)
    return Rate(1 / (collect + learn), learn / (collect + learn))


def _sync(measured: Measurement, mode: str, config: Config, num_workers: int) -> Rate:
    env = measured.environment
    around = line(measured.sync_seconds, num_workers)
    cpu = env.cpu_share * float(np.mean(env.step_seconds))
    # A vector step ends when the slowest environment is done, or when the cores have done the work of all.
    barrier = [
        around + max(expected_max(env.step_seconds, active), active * cpu / measured.parallel_cores)
        for active in range(1, num_workers + 1)
    ]
    reset = around + float(np.mean(env.reset_seconds))
    limits = (env.time_limit, config.deterministic)
    return play_in_step(num_workers, _lengths(measured), [0.0, *barrier], reset, _learning(measured, mode), *limits)


def _episodes(measured: Measurement, mode: str, config: Config, num_workers: int) -> Rate:
    """Workers that play whole episodes, or segments, by themselves."""
    env = measured.environment
    segment_steps, num_envs = config.collector.segment_steps, config.collector.envs_per_worker
    hand_over = _overhead(measured, mode).worker  # processor time, so it adds to wall time and processor time alike
    wall, cpu = vector_seconds(env, num_envs)
    seconds = wall + hand_over
    cpu_share = min(1.0, (cpu + hand_over) / seconds)
    cores = measured.parallel_cores
    learning = _learning(measured, mode)
    if segment_steps:
        unit = Work(segment_steps * num_envs * seconds, segment_steps * num_envs)
        return play_rounds(num_workers, cpu_share, cores, lambda: unit, learning, config.max_lag, unit.steps)
    draw = _episodes_drawn(env, seconds - env.seconds_per_step, num_envs)
    # A worker with n environments counts as n workers, each of which is n times as slow.
    crowd = (num_workers * num_envs, cpu_share / num_envs, cores)
    return play_rounds(*crowd, draw, learning, config.max_lag, None, env.time_limit, config.deterministic)


def _batch(measured: Measurement, mode: str, config: Config, num_workers: int) -> Rate:
    collector = config.collector
    wall, cpu = vector_seconds(measured.environment, collector.num_envs)
    unit = Work(collector.unit_steps * wall, collector.unit_steps)
    max_lag = collector.max_queue_size if config.max_lag is None else config.max_lag
    cores = measured.parallel_cores
    return play_rounds(
        1, min(1.0, cpu / wall), cores, lambda: unit, _learning(measured, mode), max_lag, collector.unit_steps
    )


def _continuous(measured: Measurement, mode: str, config: Config, num_workers: int) -> Rate:
    collector = dataclasses.replace(config.collector, num_collectors=num_workers)
    wall, cpu = vector_seconds(measured.environment, collector.envs_per_collector)
    in_threads = collector.collector_kind == "thread"
    if collector.collector_kind == "auto":
        in_threads = (measured.environment.threads_speed_up or 0.0) >= THREADS_PAY_OFF
    learn = _learning(measured, mode).seconds_per_step
    return never_waiting(num_workers, wall, cpu, learn, measured.parallel_cores, in_threads)


_PREDICTORS: dict[Predictor, Callable[[Measurement, str, Config, int], Rate]] = {
    Predictor.ALTERNATING: _sequential,
    Predictor.LOCKSTEP: _sync,
    Predictor.SCHEDULED_UNITS: _episodes,
    Predictor.BATCHES: _batch,
    Predictor.DROPPING_QUEUE: _continuous,
}


def _lengths(measured: Measurement) -> Callable[[], int]:
    rng = np.random.default_rng(0)
    lengths = measured.environment.lengths or (1_000_000,)  # without an end, episodes practically never end
    drawn = rng.choice(lengths, max(FEWEST_EPISODES_DRAWN, len(lengths))).tolist()
    return itertools.cycle(drawn).__next__


def _episodes_drawn(env: Environment, overhead: float, num_envs: int) -> Callable[[], Work]:
    """Draws episodes like the measured ones: a length, and that many step times from the sample."""
    rng = np.random.default_rng(0)
    steps, resets = np.array(env.step_seconds), np.array(env.reset_seconds)
    drawn = []
    for length in rng.choice(env.lengths, FEWEST_EPISODES_DRAWN).tolist():
        seconds = float(rng.choice(steps, length).sum() + rng.choice(resets)) + length * overhead
        drawn.append(Work(num_envs * seconds, length))
    return itertools.cycle(drawn).__next__
