"""Trains one order after another with the same warm workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from freerun.experiment import run
from freerun.run import series
from freerun.run.pool import Pool
from freerun.settings.config import AnyConfig
from freerun.settings.factories import make_factory
from freerun.tools.workflow_search.precedence import ORDERS

MOST_POOLS = 3
"""Workers belong to one seed. Those of the seeds that were used last stay warm."""


@dataclass(frozen=True)
class TrainingJob:
    """One training: an order and a seed."""

    trial: int
    order: int
    """The place of the order in `precedence.ORDERS`."""
    seed: int
    run_dir: Path
    init_from: Path | None = None
    """The run whose weights it starts from; None if it starts from nothing."""


class TrainerGroup(Protocol):
    """What trains the jobs of a search: this process, or several others."""

    num_at_once: int

    def start(self, job: TrainingJob) -> None: ...

    def wait(self) -> tuple[TrainingJob, dict[str, Any] | None]:
        """Return a job that has ended, and its figures; None instead of them if it was interrupted."""
        ...


class OrderTrainer:
    """Trains in this process. Its workers stay warm from one training to the next."""

    def __init__(self, config: AnyConfig, num_episodes: int):
        """`config` names all orders. Each trained policy is judged by `num_episodes` episodes."""
        self._config = config
        self._num_episodes = num_episodes
        self._trainings = config.env_settings.series()
        self._pools: dict[int, Pool] = {}
        self._num_trained = 0

    def train(self, job: TrainingJob) -> dict[str, Any] | None:
        """Train, judge the policy, and return the figures; None if the training was interrupted."""
        env_settings = self._trainings[ORDERS[job.order]]
        # What a killed search has trained of this order goes on from its newest checkpoint. It gets workers of its own,
        # because those of a pool know trainings by numbers that only increase.
        path, found = series.find_place(job.run_dir)
        pool = self._pool(job.seed) if found is None else None
        own = dataclasses.replace(
            self._config, env_settings=env_settings, run_dir=path, seed=job.seed, init_from=job.init_from
        )
        # Workers read from the number of the training, modulo the number of orders, which order they serve.
        number = job.order + self._num_trained * len(ORDERS)
        self._num_trained += 1
        result = run(own, pool, number if pool else 0, found)
        if result.summary["outcome"] != "finished":
            return None
        # Every order is judged by the same episodes, whatever seed it was trained with.
        judged = dataclasses.replace(own, seed=self._config.seed)
        return {
            "run": path.name,
            **series.figures_of(result),
            **series.judge(judged, result.policy.actor, self._num_episodes),
        }

    def _pool(self, seed: int) -> Pool | None:
        """Return the workers of a seed; None if the mode needs new ones for every training."""
        if not series.can_share_workers(self._config):
            return None
        if seed in self._pools:
            self._pools[seed] = self._pools.pop(seed)  # the dictionary is ordered by last use
        else:
            if len(self._pools) >= MOST_POOLS:
                self._pools.pop(next(iter(self._pools))).close()
            self._pools[seed] = Pool(make_factory(self._config))
        return self._pools[seed]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class InlineTrainers:
    """One training at a time, in this process."""

    num_at_once = 1

    def __init__(self, trainer: OrderTrainer):
        self._trainer = trainer
        self._jobs: list[TrainingJob] = []

    def start(self, job: TrainingJob) -> None:
        self._jobs.append(job)

    def wait(self) -> tuple[TrainingJob, dict[str, Any] | None]:
        job = self._jobs.pop()
        return job, self._trainer.train(job)


@contextmanager
def inline_trainers(config: AnyConfig, num_episodes: int) -> Iterator[InlineTrainers]:
    trainer = OrderTrainer(config, num_episodes)
    try:
        yield InlineTrainers(trainer)
    finally:
        trainer.close()
