"""The composition root: puts the parts of a run together, and turns the crank."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freerun import learners
from freerun.completing import complete
from freerun.config import TrainConfig
from freerun.core import SERIES_BITS, Policy, Start, UserError
from freerun.making import check_fit, make_algorithm, make_envs
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.run_folder import RunFolder
from freerun.persistence.secrecy import refuse_hidden
from freerun.pool import Pool
from freerun.recording import Recorder, Run, restore
from freerun.registry import flatten_config
from freerun.resuming import check_changes
from freerun.telemetry.budget import Budget
from freerun.telemetry.joint_ledger import JointLedger
from freerun.telemetry.ledger import Ledger
from freerun.training import train


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run_dir: Path
    summary: dict[str, Any]
    policy: Policy
    is_kept: bool = True
    """Whether the disk took all of it."""
    page: str | None = None
    """Address of the web page that showed it, with --watch."""


def run(
    config: TrainConfig[Any, Any], pool: Pool | None = None, series: int = 0, resumed: Checkpoint | None = None
) -> Result:
    """Train as configured; keep what was learned also when the run is interrupted or fails.

    Given a pool, its workers serve: this is the `series`-th training of theirs, and they stay for the next. Given a
    checkpoint, the run goes on from there.
    """
    config = complete(config)
    settings = flatten_config(config)
    refuse_hidden(settings)
    if resumed is not None:
        check_changes(config, resumed)
    with contextlib.ExitStack() as stack:
        if pool is not None and config.num_learners > 1:
            raise UserError("several workflows are trained by one learner: leave --num-learners out")
        learner = stack.enter_context(learners.joined(config, functools.partial(run, resumed=resumed)))
        peers, config = learner.peers, learner.config
        if resumed is None or peers.index > 0:
            folder = RunFolder.choose(config.run_dir, settings["env"], config.mode)
        else:
            folder = RunFolder(resumed.path.parent.parent)
        if pool is None:
            pool = Pool(make_envs(config))
            stack.callback(pool.close)
        algorithm = make_algorithm(config, pool.factory, peers)
        check_fit(config, algorithm)
        ledger = Ledger(first_episode=series << SERIES_BITS) if peers.count == 1 else JointLedger(peers)
        start = Start(series << SERIES_BITS)
        if resumed is not None:
            start = restore(resumed.state, algorithm, ledger)
            resumed = resumed if peers.index == 0 else None  # the others have no folder to go on in
        if resumed is not None:
            stack.callback(folder.claim())
        started = time.perf_counter()
        collector = pool.collector(config, algorithm, start, peers)
        budget = Budget(config.total_steps, config.total_episodes)
        assert pool.tracks is not None
        parts = (algorithm, collector, ledger, budget, pool.tracks, pool.incidents)
        this = Run(config, settings, *parts, time.perf_counter() - started)
        record = stack.enter_context(Recorder(this, folder, resumed, is_follower=peers.index > 0))
        outcome, error = "failed", None
        try:
            with record.stoppable():
                learn = functools.partial(
                    train, algorithm, collector, budget, ledger, record.sinks, record.gauges, record.shares
                )
                if hasattr(collector, "simulator_watch"):
                    collector.simulator_watch.when_stuck = record.abandon
                if hasattr(collector, "beside"):
                    collector.beside(learn)
                else:
                    learn()
            outcome = "finished"
        except KeyboardInterrupt:
            learner.interrupted()
            outcome = "interrupted"
        except Exception as failure:
            error = str(failure)
            raise
        finally:
            summary = record.finish(outcome, error)
    return Result(folder.path, summary, algorithm.policy, record.is_kept, record.page)
