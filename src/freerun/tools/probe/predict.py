"""Formulas and simulations from measured times to steps per second. They have a clock of their own and run nothing."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.collecting.scheduling.dropping_queue import REFRESH_SHARE
from freerun.collecting.scheduling.rounds import Rounds
from freerun.collecting.scheduling.segment_rounds import UnitRounds
from freerun.core import Demand

WARM_UP_UPDATES = 2
"""Simulated updates that do not count: all workers begin at the same time in the first one."""
UPDATES = 8
FEWEST_EPISODES_DRAWN = 512
"""The number of episodes that are drawn in advance, with a fixed seed, and then used in turn."""


@dataclass(frozen=True)
class Work:
    """What a unit (an episode or a segment) takes a worker on an idle machine."""

    seconds: float
    steps: int


@dataclass(frozen=True)
class Learning:
    """What the learner asks for, and how long it takes to learn from it."""

    demand: Demand
    """What one update asks for."""
    seconds_per_step: float
    """Time of updates and of receiving the data, per step that is learned from."""

    def missing(self, fresh_steps: int, fresh_units: int) -> Demand:
        """Return what an update still needs when this much has arrived since the last one."""
        if self.demand.episodes:
            return Demand(episodes=max(0, self.demand.episodes - fresh_units))
        steps = max(0, self.demand.steps - fresh_steps)
        return Demand(steps=steps, whole_episodes=self.demand.whole_episodes, next_steps=self.demand.steps)


@dataclass(frozen=True)
class Rate:
    """A predicted speed."""

    steps_per_second: float
    learner_busy: float
    """The share of the time in which the learner updates."""


# ---------------------------------------------------------------------------------------------- closed forms


def expected_max(sample: Sequence[float] | NDArray[Any], count: int) -> float:
    """E[max of `count` draws] from the sample: what a barrier waits for.

    The k-th of m values in order is the largest of n draws with probability (k/m)^n − ((k−1)/m)^n.
    """
    ordered = np.sort(np.asarray(sample, float))
    share = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.dot(ordered, np.diff(share**count)))


def overlap_ceiling(collect_seconds: float, learn_seconds: float) -> float:
    """The largest possible speed-up from collecting and learning at the same time instead of in turns."""
    return (collect_seconds + learn_seconds) / max(collect_seconds, learn_seconds)


def core_shares(num_workers: int, worker_demand: float, learner_demand: float, cores: float) -> tuple[float, float]:
    """How fast workers and learner get on, as shares of full speed, where each wants that part of a core.

    Nobody gets more than it wants, and what is short is short for the greedy: n·min(d, s) + min(l, s) = cores.
    """
    if num_workers * worker_demand + learner_demand <= cores:
        return 1.0, 1.0
    # The smaller demands are served first. Those who want more than an equal share of what is left all get that share.
    level = cores / (num_workers + (learner_demand > 0))
    if worker_demand <= level:
        level = cores - num_workers * worker_demand
    elif learner_demand <= level:
        level = (cores - learner_demand) / num_workers
    worker = min(1.0, level / worker_demand) if worker_demand > 0 else 1.0
    learner = min(1.0, level / learner_demand) if learner_demand > 0 else 1.0
    return worker, learner


# ---------------------------------------------------------------------------------------------- played


@dataclass(frozen=True)
class _Unit:
    """The part of a `core.Segment` that `Rounds` reads."""

    num_steps: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Stepping:
    """How fast a worker steps, by the number of environments that it steps in turn."""

    wall: tuple[float, ...]
    """Seconds per step with one environment, with two, and so on."""
    cpu: tuple[float, ...]
    """Processor seconds per step."""

    @classmethod
    def alone(cls, cpu_share: float) -> Stepping:
        """A worker with one environment, whatever its speed."""
        return cls((1.0,), (cpu_share,))

    @property
    def num_envs(self) -> int:
        return len(self.wall)

    def at(self, num_active: float) -> tuple[float, float]:
        """Return the speed of each environment as a share of one alone, and the share of a core that the worker uses.

        Workers may have one environment more or less than the mean, which need not be a whole number.
        """
        if len(self.wall) == 1:
            return 1.0, self.cpu[0] / self.wall[0]
        sizes = range(1, len(self.wall) + 1)
        wall, cpu = (float(np.interp(num_active, sizes, values)) for values in (self.wall, self.cpu))
        # All of them take num_active * wall seconds for a step of each.
        return self.wall[0] / (num_active * wall), min(1.0, cpu / wall)


class _Play:
    """Simulates workers and a learner that share cores. All workers are equally fast, so they need one clock."""

    def __init__(self, num_workers: int, stepping: Stepping, cores: float, rounds: Rounds, draw: Callable[[], Work]):
        self.now = 0.0
        self._worker_clock = 0.0
        self._running: list[tuple[float, int, int]] = []  # when by the workers' clock, which unit, how many steps
        self._num_workers = num_workers
        self._stepping = stepping
        self._cores = cores
        self._rounds = rounds
        self._draw = draw
        self._known_speeds: dict[tuple[int, float], tuple[float, float]] = {}

    def deal(self) -> None:
        """Start units in idle environments, as far as the rounds allow."""
        num_envs = self._num_workers * self._stepping.num_envs
        while len(self._running) < num_envs and (number := self._rounds.next()) is not None:
            work = self._draw()
            heapq.heappush(self._running, (self._worker_clock + work.seconds, number, work.steps))

    def _speeds(self, learner_demand: float) -> tuple[float, float]:
        """Return the speeds of the workers' clock and of the learner. Units are dealt out evenly among the workers."""
        num_running = len(self._running)
        place = (num_running, learner_demand)
        if place not in self._known_speeds:
            num_busy = min(self._num_workers, num_running)
            env_speed, cpu_share = self._stepping.at(num_running / num_busy) if num_busy else (1.0, 0.0)
            worker, learner = core_shares(num_busy, cpu_share, learner_demand, self._cores)
            self._known_speeds[place] = env_speed * worker, learner
        return self._known_speeds[place]

    def until_next(self) -> None:
        """Advance until a unit is finished, while the learner waits."""
        speed, _ = self._speeds(0.0)
        self.now += (self._running[0][0] - self._worker_clock) / speed
        self._finish_next()

    def learn(self, seconds: float) -> None:
        """Advance while the learner computes for that long on one core; workers go on with their units."""
        self.deal()  # what the learner has taken may have made room for more
        while seconds > 0:
            speed, learner_speed = self._speeds(1.0)
            needed = seconds / learner_speed
            # Real time until a worker is done: its remaining seconds at full speed, over the speed it has now.
            to_next = (self._running[0][0] - self._worker_clock) / speed if self._running else math.inf
            if needed <= to_next:
                self.now += needed
                self._worker_clock += needed * speed
                return
            self.now += to_next
            seconds -= to_next * learner_speed
            self._finish_next()

    def _finish_next(self) -> None:
        self._worker_clock, number, steps = heapq.heappop(self._running)
        self._rounds.finish(number, _Unit(steps))  # type: ignore[arg-type]
        self.deal()


def play_rounds(
    num_workers: int,
    cpu_share: float,
    cores: float,
    draw: Callable[[], Work],
    learning: Learning,
    max_lag: int | None,
    unit_steps: int | None = None,
    time_limit: int | None = None,
    deterministic: bool = False,
    stepping: Stepping | None = None,
    most_ahead: float = math.inf,
) -> Rate:
    """Modes whose workers play units by themselves. The real `Rounds` decide what may start and what an update gets.

    With `stepping`, a worker has several environments, each with a unit of its own, and `draw` says what a unit takes
    where it is the only one; otherwise `cpu_share` is the share of a core that a worker uses."""
    stepping = stepping or Stepping.alone(cpu_share)
    rounds: Rounds
    if unit_steps:
        rounds = UnitRounds(max_lag, unit_steps, most_ahead=most_ahead)
    else:
        rounds = Rounds(max_lag, None, num_workers * stepping.num_envs, time_limit, deterministic)
    play = _Play(num_workers, stepping, cores, rounds, draw)
    steps_at = []
    busy = 0.0
    total = 0
    for version in range(WARM_UP_UPDATES + UPDATES):
        fresh_steps = fresh_units = 0
        # As in `training.train`: collect what is missing; where nothing is, take what has arrived, and update.
        while True:
            demand = learning.missing(fresh_steps, fresh_units)
            if demand:
                rounds.open(demand)
                play.deal()
                while (units := rounds.take()) is None:
                    play.until_next()
            else:
                units = rounds.take_arrived()
            fresh_steps += sum(unit.num_steps for unit in units)
            fresh_units += len(units)
            if not learning.missing(fresh_steps, fresh_units):
                break
        began = play.now
        play.learn(fresh_steps * learning.seconds_per_step)
        if version >= WARM_UP_UPDATES:
            busy += play.now - began
        total += fresh_steps
        rounds.version = version + 1
        steps_at.append((play.now, total))
    (start, before), (end, after) = steps_at[WARM_UP_UPDATES - 1], steps_at[-1]
    return Rate((after - before) / (end - start), busy / (end - start))


def play_in_step(
    num_envs: int,
    lengths: Callable[[], int],
    seconds_by_active: Sequence[float],
    reset_seconds: float,
    learning: Learning,
    time_limit: int | None = None,
    deterministic: bool = False,
) -> Rate:
    """Environments stepped together, in turns with the learner. An episode of a round that has no successor in it
    leaves its environment idle; `seconds_by_active[k]` is the time of a step when k are left."""
    if not learning.demand.whole_episodes:
        # Nobody waits for the end of an episode, so all environments step all the time and no simulation is needed.
        vector_steps = math.ceil(learning.demand.steps / num_envs)
        mean_length = float(np.mean([lengths() for _ in range(FEWEST_EPISODES_DRAWN)]))
        # An environment resets every mean_length steps: num_envs / mean_length resets per vector step, at most one.
        collect = vector_steps * (seconds_by_active[num_envs] + reset_seconds * min(1.0, num_envs / mean_length))
        learn = vector_steps * num_envs * learning.seconds_per_step
        return Rate(vector_steps * num_envs / (collect + learn), learn / (collect + learn))
    rounds = Rounds(0, None, num_envs, time_limit, deterministic)
    now, total, busy, start, before = 0.0, 0, 0.0, 0.0, 0
    for version in range(WARM_UP_UPDATES + UPDATES):
        if version == WARM_UP_UPDATES:
            start, before, busy = now, total, 0.0
        fresh_steps = fresh_units = 0
        while demand := learning.missing(fresh_steps, fresh_units):
            rounds.open(demand)
            active: list[tuple[int, int, int]] = []  # at which step it ends, its number, its length
            step = 0
            while (units := rounds.take()) is None:
                begun = len(active)
                while len(active) < num_envs and (number := rounds.next()) is not None:
                    length = lengths()
                    heapq.heappush(active, (step + length, number, length))
                # Environments that reset together wait for each other once.
                now += reset_seconds if len(active) > begun else 0.0
                end, number, length = heapq.heappop(active)
                # Until the next episode ends, the same number of environments steps together.
                now += (end - step) * seconds_by_active[len(active) + 1]
                step = end
                rounds.finish(number, _Unit(length))  # type: ignore[arg-type]
            fresh_steps += sum(unit.num_steps for unit in units)
            fresh_units += len(units)
        learn = fresh_steps * learning.seconds_per_step
        now, total, busy = now + learn, total + fresh_steps, busy + learn
        rounds.version = version + 1
    return Rate((total - before) / (now - start), busy / (now - start))


def never_waiting(
    num_collectors: int, seconds: float, cpu_seconds: float, learn_seconds: float, cores: float, in_threads: bool
) -> Rate:
    """Collectors that never wait, all per step: as fast as they are, or the learner, or the cores.

    A queue that is full holds them back to what refreshes it. Threads share one core.
    """
    together = 1.0 if in_threads else cores
    # Collectors that are faster than the learner spend this share of a core on steps that only replace older ones.
    if num_collectors / seconds > 1 / learn_seconds:
        together -= REFRESH_SHARE
    # The cores do `cpu_seconds + learn_seconds` of work for each step that is collected and learned from.
    rate = min(num_collectors / seconds, 1 / learn_seconds, together / (cpu_seconds + learn_seconds))
    return Rate(rate, rate * learn_seconds)
