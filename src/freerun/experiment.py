"""The wiring of a run on one page: which parts there are, in which order they are made, and what connects them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freerun.collecting.env_args_channel import EnvArgsCollector
from freerun.collecting.scheduling.joint_collector import own_collector
from freerun.core import (
    Collector,
    SimulatorCollector,
    SimulatorThreadCollector,
    StartPoint,
    StopRun,
    UserError,
    WeightExchange,
    first_episode_of,
)
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.redaction import refuse_redacted
from freerun.persistence.run_folder import RunFolder
from freerun.run import init_from, learner_group
from freerun.run.checkpoint_state import restore
from freerun.run.init_from import Learned
from freerun.run.outputs import RunOutputs
from freerun.run.pool import Pool
from freerun.run.resume import check_changes
from freerun.run.run_parts import RunParts
from freerun.run.trained_policy import TrainedPolicy, own_settings
from freerun.run.update_hooks import Callback, UpdateHooks, changes_env_args, find_callbacks
from freerun.settings.config import AnyConfig
from freerun.settings.defaults import complete
from freerun.settings.factories import cautions, check_fit, make_algorithm, make_envs
from freerun.settings.registry import flatten_config
from freerun.telemetry.budget import Budget
from freerun.telemetry.joint_ledger import JointLedger
from freerun.telemetry.ledger import Ledger
from freerun.training import train

logger = logging.getLogger("freerun")


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run_dir: Path
    summary: dict[str, Any]
    """The content of summary.json."""
    policy: TrainedPolicy
    """The policy as it was at the end, to act with: `result.policy.predict(obs)`."""
    is_kept: bool = True
    """False if the disk did not take everything that the run wrote."""
    page: str | None = None
    """The address of the web page that showed the run, with --watch."""


def run(
    config: AnyConfig,
    pool: Pool | None = None,
    training: int = 0,
    resumed: Checkpoint | None = None,
    learned: Learned | None = None,
    on_update: Callback | None = None,
    exchange: WeightExchange | None = None,
) -> Result:
    """Train as configured. What was learned is saved even if the run is interrupted or fails.

    With a `pool`, its workers serve: this is their k-th `training` in a series, and they stay for the next. With a
    checkpoint, the run continues from there. `learned` is what --init-from names, if another learner has read it.
    `on_update` is called after every update, as the callbacks of the settings are. With a `pool` it cannot give
    environments other arguments, because the next training would have them too. `exchange` shares what is learned with
    other runs.
    """
    # 1. Settings: complete, allowed, and written down by their flat names.
    config = complete(config)
    if config.init_from is not None and resumed is None:  # a resumed run started from there long ago
        learned = learned or init_from.find(config.init_from)
        config = dataclasses.replace(config, init_from=learned.path)
    settings = flatten_config(config)
    refuse_redacted(settings)
    if resumed is not None:
        check_changes(config, resumed)
    if pool is not None and config.num_learners > 1:
        raise UserError("a series of trainings has one learner: leave --num-learners out")
    if exchange is not None and config.num_learners > 1:
        raise UserError("a run that shares its weights with others has one learner: leave --num-learners out")
    callbacks = find_callbacks(config.callback, on_update)
    if (config.callback and pool is not None) or (callbacks and config.num_learners > 1):
        raise UserError("callbacks are for a single training with one learner: leave --callback out")
    with contextlib.ExitStack() as stack:
        # 2. Learners: usually this process alone. Each of several runs this function, with its share of the workers.
        again = functools.partial(run, resumed=resumed, learned=learned)
        learner = stack.enter_context(learner_group.joined(config, again))
        group, config = learner.peers, learner.config
        is_first = group.index == 0
        resumed_here = resumed if is_first else None  # the other learners have no folder to continue in
        if resumed_here is not None:
            folder = RunFolder(resumed_here.path.parent.parent)
        else:
            folder = RunFolder.choose(config.run_dir, settings["env"], config.mode)

        # 3. Environments, the algorithm, and the ledger: new, from another run's networks, or from a checkpoint.
        if pool is None:
            pool = Pool(make_envs(config, group.index), changes_env_args(callbacks, resumed))
            stack.callback(pool.close)
        algorithm = make_algorithm(config, pool.factory, group)
        if learned is not None:
            init_from.start(algorithm, learned, pool.factory.spaces, config)
        check_fit(config, algorithm)
        first_episode = first_episode_of(training)
        ledger = Ledger(first_episode=first_episode) if group.count == 1 else JointLedger(group)
        start = StartPoint(first_episode) if resumed is None else restore(resumed.state, algorithm, ledger)
        if resumed_here is not None:
            stack.callback(folder.claim())

        # 4. Workers, which collect from now on; and everything that the run writes and shows.
        began = time.perf_counter()
        collector = pool.collector(config, algorithm, start, group)
        startup_seconds = time.perf_counter() - began
        budget = Budget(config.total_steps, config.total_episodes)
        assert pool.tracks is not None  # `pool.collector` has made them
        made = (algorithm, collector, ledger, budget, pool.tracks, pool.incidents)
        parts = RunParts(config, settings, pool.factory.spaces, *made, startup_seconds, pool.act_seconds)
        hooks = UpdateHooks(callbacks, parts, pool.env_args, folder.path)
        if resumed is not None:
            hooks.restore(resumed.state)
        outputs = stack.enter_context(RunOutputs(parts, folder, resumed_here, hooks, is_follower=not is_first))

        # 5. The training loop.
        if is_first:
            for sentence in cautions(config, pool.factory, algorithm):
                logger.warning(sentence)
        publishing = collector if pool.env_args is None else EnvArgsCollector(collector, pool.env_args)
        summary = _train(parts, publishing, outputs, learner.interrupted, exchange)
    policy = TrainedPolicy(algorithm.policy, pool.factory.spaces, functools.partial(own_settings, config))
    return Result(folder.path, summary, policy, outputs.is_complete, outputs.page)


def _train(
    parts: RunParts,
    publishing: Collector,
    outputs: RunOutputs,
    interrupted: Callable[[], None],
    exchange: WeightExchange | None,
) -> dict[str, Any]:
    """Run the training loop, save what was learned whatever ends it, and return the summary.

    `publishing` is the collector as the loop sees it.
    """
    collector = own_collector(parts.collector)
    recorded = (outputs.sinks, outputs.gauges, outputs.shares, exchange)
    learn = functools.partial(train, parts.algorithm, publishing, parts.budget, parts.ledger, *recorded)
    outcome, error, reason = "failed", None, None
    try:
        with outputs.interruptible():
            if isinstance(collector, SimulatorCollector):
                collector.simulator_watch.when_stuck = outputs.abandon
            if isinstance(collector, SimulatorThreadCollector):
                collector.run_with_learner(learn)
            else:
                learn()
        outcome = "finished"
    except KeyboardInterrupt:
        interrupted()  # raises what ended another learner, if that is why this one was interrupted
        outcome = "interrupted"
    except StopRun as stop:
        outcome, reason = stop.outcome, str(stop)
    except Exception as failure:
        error = str(failure)
        raise
    finally:
        summary = outputs.finish(outcome, error, reason)
    return summary
