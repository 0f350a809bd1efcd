"""Predicts the speed of every mode from what was measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freerun.collecting.modes.continuous import THREADS_PAY_OFF
from freerun.core import Demand, Predictor, ProbeModel
from freerun.settings.registry import find_mode
from freerun.tools.probe.candidates import (
    Candidate,
    MachineLimits,
    Search,
    envs_per_worker_of,
    unit_steps_of,
    workers_of,
)
from freerun.tools.probe.measure import Config
from freerun.tools.probe.measurement import (
    DEFAULT_EPISODE_STEPS,
    Environment,
    Measurement,
    Overhead,
    vector_seconds,
)
from freerun.tools.probe.predict import (
    FEWEST_EPISODES_DRAWN,
    Learning,
    Rate,
    Stepping,
    Work,
    expected_max,
    never_waiting,
    play_in_step,
    play_rounds,
)
from freerun.tools.probe.update_costs import update_cost


@dataclass(frozen=True)
class Forecast:
    """The predicted speed of a candidate; None and a note where it could not train."""

    mode: str
    num_workers: int
    steps_per_second: float | None
    episodes_per_second: float | None = None
    learner_busy: float | None = None
    """The share of the time in which the learner would update."""
    note: str = ""
    settings: Mapping[str, int] = field(default_factory=dict)
    """What the candidate chooses, by the names of the settings."""
    num_envs: int = 0
    """The number of environments that are stepped at the same time."""
    segment_steps: int | None = None
    """Steps of each environment that are handed over at a time; None for whole episodes."""
    update_steps: int | None = None
    """Steps that an update asks for; None if it asks for episodes."""

    @property
    def speed(self) -> float:
        return self.steps_per_second or 0.0


def forecast(measured: Measurement, search: Search) -> list[Forecast]:
    """Predict every candidate."""
    update_steps = measured.updates[0].demand["steps"]
    limits = MachineLimits(measured.environment, measured.cores, measured.available_megabytes, update_steps)
    return [predict_candidate(measured, candidate) for candidate in search.candidates(limits)]


def predict_candidate(measured: Measurement, candidate: Candidate) -> Forecast:
    """Predict the speed of a run with the completed settings of a candidate."""
    env, config = measured.environment, candidate.config
    traits = find_mode(candidate.mode).traits
    demand = update_cost(measured.updates, config).demand
    in_segments = not traits.whole_episodes or bool(config.collector.segment_steps)
    found = Forecast(
        candidate.mode,
        candidate.num_workers,
        None,
        settings=candidate.settings,
        num_envs=candidate.num_envs,
        segment_steps=_segment_steps(config) if in_segments else None,
        update_steps=demand["steps"] or None,
    )
    # A mode that takes turns can also hand over part of an episode, if the algorithm lets it.
    waits_for_end = not in_segments and (demand["whole_episodes"] or not traits.takes_turns)
    if waits_for_end and not env.lengths:
        return dataclasses.replace(found, note="waits for whole episodes, and none has ended")
    rate = _PREDICTORS[_model(config).predictor](measured, config)
    return dataclasses.replace(
        found,
        steps_per_second=rate.steps_per_second,
        episodes_per_second=rate.steps_per_second / env.mean_length if env.mean_length else None,
        learner_busy=rate.learner_busy,
    )


def _segment_steps(config: Config) -> int:
    """Return the steps of each environment in one segment."""
    return round(unit_steps_of(config, DEFAULT_EPISODE_STEPS) / envs_per_worker_of(config))


def _model(config: Config) -> ProbeModel:
    model = find_mode(config.mode).traits.probe
    assert model is not None  # `auto_mode` has refused modes without one
    return model


def _overhead(measured: Measurement, config: Config) -> Overhead:
    """Return what a mode costs per step with the units of this config."""
    model = _model(config)
    episode_steps = measured.environment.mean_length or 1.0
    unit_steps = unit_steps_of(config, episode_steps)
    known = measured.overheads.get(model.overhead_of or config.mode) or (Overhead(0.0, 0.0),)
    worker = _per_step(unit_steps, [(cost.unit_steps, cost.worker) for cost in known])
    learner = _per_step(unit_steps, [(cost.unit_steps, cost.learner) for cost in known])
    return Overhead(
        worker + model.worker_seconds_per_unit / unit_steps, learner + model.learner_seconds_per_unit / unit_steps
    )


def _per_step(unit_steps: float, known: Sequence[tuple[float, float]]) -> float:
    """Return what a step costs in units of this many steps, from what it costs in the smallest and largest known ones.

    A unit of n steps costs a + b · n, so a step costs a / n + b. Where one size alone is known, its cost is taken for
    all; and noise must not make smaller units cheaper."""
    (fewest, most_cost), (most, least_cost) = min(known), max(known)
    if fewest == most:
        return most_cost
    per_unit = max(0.0, (most_cost - least_cost) / (1 / fewest - 1 / most))
    return max(0.0, least_cost + per_unit * (1 / unit_steps - 1 / most))


def _learning(measured: Measurement, config: Config) -> Learning:
    update = update_cost(measured.updates, config)
    return Learning(Demand(**update.demand), update.seconds_per_step + _overhead(measured, config).learner)


def line(known: Mapping[str, float], size: int) -> float:
    """Interpolate between the known points, and extrapolate beyond the last."""
    # JSON has no numbers as keys. The sizes were measured in rising order.
    sizes, values = [int(key) for key in known], list(known.values())
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, values))
    slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
    return values[-1] + slope * (size - sizes[-1])


# ---------------------------------------------------------------------------------------------- a model for each mode


def _sequential(measured: Measurement, config: Config) -> Rate:
    learn = _learning(measured, config).seconds_per_step
    collect, _ = vector_seconds(measured.environment, 1)
    return Rate(1 / (collect + learn), learn / (collect + learn))


def _sync(measured: Measurement, config: Config) -> Rate:
    env, num_workers = measured.environment, workers_of(config)
    around = line(measured.sync_seconds, num_workers)
    steps = np.array(env.step_seconds) * env.own_share
    cpu = env.cpu_share * float(np.mean(steps))
    # A vector step ends when the slowest environment is done, or when the cores have done the work of all.
    barrier = [
        around + max(expected_max(steps, active), active * cpu / measured.parallel_cores)
        for active in range(1, num_workers + 1)
    ]
    reset = around + float(np.mean(env.reset_seconds)) * env.own_share
    limits = (env.time_limit, config.deterministic)
    return play_in_step(num_workers, _lengths(measured), [0.0, *barrier], reset, _learning(measured, config), *limits)


def _episodes(measured: Measurement, config: Config) -> Rate:
    """Workers that play whole episodes, or segments, by themselves."""
    env, num_workers, cores = measured.environment, workers_of(config), measured.parallel_cores
    segment_steps, num_envs = config.collector.segment_steps, envs_per_worker_of(config)
    hand_over = _overhead(measured, config).worker  # processor time, so it adds to wall time and processor time alike
    learning = _learning(measured, config)
    seconds = [tuple(part + hand_over for part in vector_seconds(env, size)) for size in range(1, num_envs + 1)]
    if segment_steps:
        wall, cpu = seconds[-1]
        unit = Work(segment_steps * num_envs * wall, segment_steps * num_envs)
        cpu_share = min(1.0, cpu / wall)
        limits_of_units = (config.max_lag, unit.steps)
        return play_rounds(
            num_workers, cpu_share, cores, lambda: unit, learning, *limits_of_units, most_ahead=num_workers
        )
    stepping = Stepping(*zip(*seconds, strict=True))
    draw = _episodes_drawn(env, seconds[0][0])
    limits = (env.time_limit, config.deterministic, stepping)
    return play_rounds(num_workers, 1.0, cores, draw, learning, config.max_lag, None, *limits)


def _batch(measured: Measurement, config: Config) -> Rate:
    collector = config.collector
    wall, cpu = vector_seconds(measured.environment, collector.num_envs)
    unit = Work(collector.unit_steps * wall, collector.unit_steps)
    max_lag = collector.max_queue_size if config.max_lag is None else config.max_lag
    cores = measured.parallel_cores
    return play_rounds(
        1, min(1.0, cpu / wall), cores, lambda: unit, _learning(measured, config), max_lag, collector.unit_steps
    )


def _continuous(measured: Measurement, config: Config) -> Rate:
    collector = config.collector
    wall, cpu = vector_seconds(measured.environment, collector.envs_per_collector)
    in_threads = collector.collector_kind == "thread"
    if collector.collector_kind == "auto":
        in_threads = (measured.environment.threads_speed_up or 0.0) >= THREADS_PAY_OFF
    learn = _learning(measured, config).seconds_per_step
    return never_waiting(workers_of(config), wall, cpu, learn, measured.parallel_cores, in_threads)


_PREDICTORS: dict[Predictor, Callable[[Measurement, Config], Rate]] = {
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


def _episodes_drawn(env: Environment, seconds_per_step: float) -> Callable[[], Work]:
    """Draws episodes like the measured ones, whose steps take this long on average, with all that is around them."""
    # What is around a step is added. Where a step takes less than was measured, others had the core for the rest.
    overhead = max(0.0, seconds_per_step - env.seconds_per_step)
    share = env.own_share * min(1.0, seconds_per_step / env.seconds_per_step)
    sample = _sampled_episodes(env.lengths, env.step_seconds, env.reset_seconds)
    drawn = [Work(seconds * share + length * overhead, length) for seconds, length in sample]
    return itertools.cycle(drawn).__next__


@functools.lru_cache(maxsize=4)
def _sampled_episodes(
    lengths: Sequence[int], step_seconds: Sequence[float], reset_seconds: Sequence[float]
) -> list[tuple[float, int]]:
    """Seconds and lengths of episodes: a length, and that many step times from the sample. All candidates share it."""
    rng = np.random.default_rng(0)
    steps, resets = np.array(step_seconds), np.array(reset_seconds)
    return [
        (float(rng.choice(steps, length).sum() + rng.choice(resets)), length)
        for length in rng.choice(lengths, FEWEST_EPISODES_DRAWN).tolist()
    ]
