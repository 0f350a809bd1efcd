"""What an update costs: measured for a few sizes of updates and minibatches, and interpolated for all others."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.core import Algorithm, background_stages, callable_name
from freerun.run.learner_threads import first_threads
from freerun.settings.config import AnyConfig
from freerun.settings.factories import limit_threads, make_algorithm, set_learner_threads
from freerun.settings.registry import find_algorithm
from freerun.tools.probe.measurement import UpdateCost
from freerun.transport.processes import usable_cores

ENOUGH_UPDATES = 5
MOST_UPDATE_SECONDS = 8.0
"""How long a learner may take until its second update has ended, which is the first one that counts."""
MOST_TIMED_STEPS = 16_384
"""Larger updates are not timed, because collecting for them takes long too: their cost per step is extrapolated."""


# ---------------------------------------------------------------------------------------------- settings


def minibatch_of(config: AnyConfig) -> int | None:
    """Return the steps of a gradient step, if the algorithm has a setting for them."""
    name = find_algorithm(config.algo).traits.minibatch_setting
    return None if name is None else getattr(config.algorithm, name)


def steps_per_update(config: AnyConfig) -> int | None:
    """Return the steps that an update asks for, if the settings say so."""
    counts_steps = find_algorithm(config.algo).traits.counts_steps
    return config.algorithm.steps_per_update if counts_steps else None


def learner_of(config: AnyConfig) -> str:
    """Return the settings of the algorithm that an update costs more or less by, besides its sizes, as text to compare.

    Settings that are None by default are left out: what a user gives is the same for all candidates, and what is filled
    in later are sizes, and settings that follow from sizes. Only the amount of work per step is not left out."""
    traits = find_algorithm(config.algo).traits
    flat = {
        field.name: getattr(config.algorithm, field.name)
        for field in dataclasses.fields(config.algorithm)
        if field.name == traits.update_ratio_setting
        or (field.default is not None and field.name != traits.minibatch_setting)
    }
    return json.dumps(
        flat, sort_keys=True, default=lambda value: callable_name(value) if callable(value) else str(value)
    )


def update_cost(updates: Sequence[UpdateCost], config: AnyConfig) -> UpdateCost:
    """Return what an update costs with these completed settings.

    A gradient step takes a + b · m seconds for a minibatch of m, and there is one for every m steps and epoch, so the
    cost per step is linear in 1/m. What an update costs besides is spread over its n steps: linear in 1/n.
    """
    steps, minibatch, learner = steps_per_update(config), minibatch_of(config), learner_of(config)
    known = [update for update in updates if update.learner == learner] or list(updates)
    # Where the algorithm decides how much it asks for, it asks for as much as it did when it was left to decide.
    alike = next((update for update in known if update.update_steps == steps), known[0])
    demand, num_steps = alike.demand, alike.steps
    if steps is not None and demand["steps"]:
        demand = {**demand, "steps": steps, "next_steps": steps}
        num_steps = alike.steps if alike.update_steps == steps else steps
    by_minibatch = {
        size: _per_step([update for update in known if update.minibatch == size], demand["steps"])
        for size in {update.minibatch for update in known}
    }
    if minibatch in by_minibatch or minibatch is None or None in by_minibatch:
        per_step = by_minibatch.get(minibatch, next(iter(by_minibatch.values())))
    else:
        sizes = sorted(size for size in by_minibatch if size is not None)
        per_step = _in_inverse(minibatch, sizes, [by_minibatch[size] for size in sizes])
    return UpdateCost(demand, num_steps, per_step * num_steps, minibatch, steps, learner)


def _per_step(updates: Sequence[UpdateCost], steps: int) -> float:
    """Return the cost per step of an update of this many steps, from updates with the same minibatches.

    A larger update does not cost more per step than a smaller one. Where it seems to, the machine was disturbed."""
    ordered = sorted(updates, key=lambda update: int(update.demand["steps"]))
    costs = list(itertools.accumulate((update.seconds_per_step for update in ordered), min))
    return _in_inverse(max(1, steps), [max(1, update.demand["steps"]) for update in ordered], costs)


def _in_inverse(size: int, sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Interpolate what is linear in 1 / size. Beyond the sizes that were measured, the cost of the nearest is taken."""
    # np.interp wants rising places.
    return float(np.interp(-1 / size, [-1 / known for known in sizes], costs))


# ---------------------------------------------------------------------------------------------- measuring


def sizes_to_time(configs: Sequence[AnyConfig]) -> list[AnyConfig]:
    """For each learner, the settings that were asked for first, and those with the smallest and the largest updates."""
    by_learner: dict[str, list[AnyConfig]] = {}
    for config in configs:
        by_learner.setdefault(learner_of(config), []).append(config)
    chosen: dict[Any, AnyConfig] = {}
    for group in by_learner.values():
        ordered = sorted(group, key=lambda config: (minibatch_of(config) or 0, steps_per_update(config) or 0))
        able = [config for config in ordered if (steps_per_update(config) or 0) <= MOST_TIMED_STEPS] or ordered[:1]
        for config in (group[0], able[0], able[-1]):
            chosen.setdefault(config.algorithm, config)
    return list(chosen.values())


def time_updates(
    configs: Sequence[AnyConfig], stand_in: GymnasiumFactory, seconds: float, has_threads: bool = False
) -> tuple[UpdateCost, ...]:
    """Measure a learner with each of these settings, on steps of the stand-in. They take turns, so that a machine which
    changes its speed favours none of them.

    Each learner has one thread, or as many as a run with its settings begins with.
    """
    # Collecting the garbage of all imports takes long: it happens here and not during one of the few updates.
    gc.collect()
    made = [(config, make_algorithm(config, stand_in)) for config in configs]
    learners = [_TimedLearner(config, algorithm, stand_in, seconds, has_threads) for config, algorithm in made]
    unfinished = [*learners]
    while unfinished:
        unfinished = [learner for learner in unfinished if learner.advance()]
    limit_threads(1, 1)
    return tuple(learner.result() for learner in learners)


class _TimedLearner:
    """An algorithm that learns from the stand-in, with a clock around its updates."""

    def __init__(
        self,
        config: AnyConfig,
        algorithm: Algorithm,
        stand_in: GymnasiumFactory,
        most_seconds: float,
        has_threads: bool,
    ):
        solo = SingleEnvRollout(stand_in.make_one(), stand_in.spec, algorithm.policy, run_seed=0)
        self._episodes = solo.episodes(next_from(itertools.count()))
        self._config = config
        self._algorithm = algorithm
        self._demand = algorithm.demand()
        self._timed: list[tuple[int, float]] = []
        self._most_seconds = most_seconds
        self._seconds = 0.0
        num_workers, num_cores = config.num_workers or 1, len(usable_cores())
        self._num_threads = first_threads(config, algorithm, num_workers, num_cores) if has_threads else 1

    def advance(self) -> bool:
        """Make updates for a while; return False if there were enough of them before."""
        # The first update is not counted: it allocates memory, may compile, and may learn from more steps than others.
        num_timed = len(self._timed) - 1
        most_seconds = self._most_seconds if num_timed > 0 else MOST_UPDATE_SECONDS
        if num_timed >= ENOUGH_UPDATES or self._seconds > most_seconds:
            return False
        turn = 0.0
        set_learner_threads(self._config, self._algorithm, self._num_threads)
        while turn < self._most_seconds / ENOUGH_UPDATES:
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
        begun, used = time.perf_counter(), time.process_time()
        self._algorithm.update(len(self._timed), 0.0)
        wall, cpu = time.perf_counter() - begun, time.process_time() - used
        # On a CPU, what an update takes beyond its processor time was taken by other programs.
        return max(1, num_steps), min(wall, cpu) if self._config.device == "cpu" else wall

    def result(self) -> UpdateCost:
        """Return the update with the median seconds per step. Stages that still run are waited for."""
        for stage in background_stages(self._algorithm).values():
            if stage.is_busy:
                stage.finish()
        timed = sorted(self._timed[1:] or self._timed, key=lambda pair: pair[1] / pair[0])
        steps, seconds = timed[(len(timed) - 1) // 2]  # one of the pairs, which a mean of two would not be
        sizes = (minibatch_of(self._config), steps_per_update(self._config), learner_of(self._config))
        return UpdateCost(dataclasses.asdict(self._demand), steps, seconds, *sizes)
