"""What is kept and shown of a run: its folder, checkpoints, metrics, timeline, trackers and display."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from freerun.adapting.adapter import FILE_NAME as ADAPTING
from freerun.adapting.adapter import Adapter
from freerun.adapting.rules import Circumstances
from freerun.collectors.trials import Trials
from freerun.config import TrainConfig
from freerun.core import Algorithm, Collector, Counts, Dial, Gauge, MetricSink, Policy, Start, UserError
from freerun.making import make_factory
from freerun.persistence import origin
from freerun.persistence.checkpoint import Checkpoint, Checkpoints
from freerun.persistence.files import Lines
from freerun.persistence.incidents import IncidentFile
from freerun.persistence.keeper import Interval, Keeper
from freerun.persistence.run_folder import RunFolder, pack_policy
from freerun.persistence.secrecy import Veil, without_secrets
from freerun.persistence.state import check_fit
from freerun.registry import TRACKERS
from freerun.telemetry.background import Background
from freerun.telemetry.budget import Budget
from freerun.telemetry.classic import ClassicLines
from freerun.telemetry.figures import RecentRecords
from freerun.telemetry.finite_guard import FiniteGuard
from freerun.telemetry.jsonl import JsonLines
from freerun.telemetry.ledger import Ledger
from freerun.telemetry.log_file import LogFile
from freerun.telemetry.machine import Machine
from freerun.telemetry.rsl_rl import RslRlBlocks
from freerun.telemetry.shares import Shares
from freerun.telemetry.terminal import LiveDisplay, LogLines
from freerun.telemetry.timeline import Recording, Timeline
from freerun.telemetry.trace import write_trace
from freerun.telemetry.tracking import TrackedRun
from freerun.telemetry.web_page import WebPage
from freerun.transport.signals import GRACE_SECONDS, interruptible
from freerun.transport.tracks import Tracks
from freerun.version import VERSION

logger = logging.getLogger("freerun")


@dataclass(frozen=True)
class Run:
    """The parts of a run, put together."""

    config: TrainConfig[Any, Any]
    settings: Mapping[str, Any]
    """The same by flat names."""
    algorithm: Algorithm
    collector: Collector
    ledger: Ledger
    budget: Budget
    tracks: Tracks
    incidents: IncidentFile
    startup_seconds: float


class Recorder:
    """Opens everything that a run writes to; closes it all in the end, also when opening fails halfway."""

    def __init__(self, run: Run, folder: RunFolder, resumed: Checkpoint | None, is_follower: bool = False):
        """A follower of several learners keeps no checkpoints and leaves interrupts to the first."""
        self._run = run
        self._folder = folder
        self._is_follower = is_follower
        self._kept_settings = without_secrets({**run.settings, "run_dir": None})
        self._dials: list[Dial] = []
        self._veil = Veil(run.settings)
        self.page: str | None = None
        """Address of the web page that shows the run, with --watch."""
        self.is_kept = True
        """Whether the disk has taken all of it."""
        with contextlib.ExitStack() as stack:
            self._open(stack, resumed)
            self._stack = stack.pop_all()
        self._began = time.perf_counter()

    def _open(self, stack: contextlib.ExitStack, resumed: Checkpoint | None) -> None:
        run, config, folder = self._run, self._run.config, self._folder
        if resumed is None:
            folder.create()
            stack.callback(folder.claim())
        origin.sign(folder.path, self._kept_settings)
        run.incidents.open(folder.path, self._veil.cover)
        stack.callback(LogFile(folder.log_path, self._veil.cover).close)
        trackers = _trackers(TrackedRun(folder.path, self._kept_settings, config.tracking, self._veil.has_secrets))
        self._lines = {
            name: Lines(folder.path / f"{name}.jsonl", _mark(resumed.state, name) if resumed else None)
            for name in ("metrics", "ledger")
        }
        run.ledger.write_to(self._lines["ledger"])
        if config.watch:
            self.page = _show(folder, config.quiet, stack)
        self._recent = RecentRecords()
        self._keeper = Keeper(
            Checkpoints(folder.path, config.keep_checkpoints, resumed),
            Interval.read(config.checkpoint_every),
            run.ledger,
            self._state,
            run.ledger.steps,
            is_resumed=resumed is not None,
        )
        guard = FiniteGuard(run.ledger, config.on_nan or "stop", config.seed, run.incidents)
        display = [] if config.quiet else [_display(config, run.settings["env"], run.budget, run.collector)]
        self.sinks: list[MetricSink] = [JsonLines(self._lines["metrics"]), guard, *display]
        self.sinks += [self._recent, *trackers, self._keeper]
        self._keeper.keep()  # so that it can be resumed from now on
        folder.write_config(self._kept_settings)
        folder.drop_results()
        machine = Machine(int(config.device.partition(":")[2] or 0) if config.device.startswith("cuda") else None)
        self.gauges = _gauges(config, run.collector, run.algorithm.policy, machine, run.ledger.steps)
        timeline = Timeline(folder.timeline_path, run.tracks, run.collector.counts, machine)
        stack.callback(_write_trace, folder)
        stack.callback(timeline.close)
        num_workers = len(run.tracks.workers)
        self.shares = Shares(num_workers, run.tracks)
        if config.adapting.adapt:
            adapter = self._adapter(machine, num_workers, resumed)
            self.shares = Shares(num_workers, run.tracks, lambda: run.collector.num_workers)
            self.sinks.append(adapter)
            self.gauges.append(adapter)
        closing = [part.close for part in self._lines.values()] + [part.close for part in self.sinks]
        for close in closing + [part.close for part in self.gauges]:
            stack.callback(close)

    def _adapter(self, machine: Machine, num_workers: int, resumed: Checkpoint | None) -> Adapter:
        """What moves the run from now on; one that was adapted before goes on with the values that it had."""
        from freerun.algorithms.dials import dials_of

        run, config = self._run, self._run.config
        bounds = config.adapting
        learning = dials_of(run.algorithm, bounds.adapt_max_minibatch, bounds.adapt_min_update_ratio)
        dials = [*run.collector.dials(), *learning]  # type: ignore[attr-defined]
        self._dials = dials
        adapted = resumed.state.get("adapted", {}) if resumed is not None else {}
        for dial in dials:
            if dial.name in adapted:
                dial.turn(min(dial.high, max(dial.low, adapted[dial.name])))
        return Adapter(
            dials,
            Circumstances(
                os.cpu_count() or 1, getattr(config.algorithm, "default_max_lag", 0) if config.max_lag is None else None
            ),
            config.adapting.adapt_window,
            run.collector.counts,
            run.tracks,
            num_workers,
            lambda: machine.read(0).get("cpu_percent", 0.0),
            self._folder.path / ADAPTING,
        )

    def _state(self, metrics: Mapping[str, float]) -> tuple[dict[str, Any], bytes] | None:
        if self._is_follower:
            return None
        run = self._run
        kept = _state(self._kept_settings, run.algorithm, run.ledger, run.collector.counts(), self._lines, metrics)
        if kept is not None and self._dials:
            kept[0]["adapted"] = {dial.name: dial.read() for dial in self._dials}
        return kept

    def stoppable(self) -> AbstractContextManager[Any]:
        """Within it, Ctrl-C and SIGTERM let the update finish; a second one ends at once."""
        if self._is_follower:
            return contextlib.nullcontext()
        return interruptible(lambda: self._keeper.is_at_rest, self._keeper.ask_to_stop)

    def finish(self, outcome: str, error: str | None) -> dict[str, Any]:
        """Keep what was learned, and sum up how it went."""
        run = self._run
        wall_seconds = run.ledger.seconds_before + time.perf_counter() - self._began
        names = ("mode", "algo", "env", "seed", "num_workers", "num_learners")
        summary = {
            "outcome": outcome,
            **({} if error is None else {"error": self._veil.cover(error)}),
            **{name: run.settings[name] for name in names},
            "startup_seconds": run.startup_seconds,
            **_figures(run.ledger, run.collector.counts(), run.incidents.by_kind, wall_seconds),
            **({"adapted": {dial.name: dial.read() for dial in self._dials}} if self._dials else {}),
            "advice": self._recent.advice(),
        }
        has_checkpoint = self._keeper.keep()
        policy = pack_policy(run.algorithm.policy.arrays, run.algorithm.policy.describe())
        self.is_kept = self._folder.write_results(policy, summary) and has_checkpoint
        return summary

    def abandon(self, failure: Exception) -> None:
        """The thread that should end the run never will: keep what was learned, say why, and end the process."""
        try:
            self._keeper.ask_to_stop()
            deadline = time.monotonic() + GRACE_SECONDS
            while not self._keeper.is_at_rest and time.monotonic() < deadline:
                time.sleep(0.05)
            self.finish("failed", str(failure))
            self._stack.close()
        finally:
            print(f"freerun: {failure}", file=sys.stderr, flush=True)
            os._exit(1)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# ---------------------------------------------------------------------------------------------- checkpoints


def _state(
    config: Mapping[str, Any],
    algorithm: Algorithm,
    ledger: Ledger,
    counts: Counts,
    lines: Mapping[str, Lines],
    metrics: Mapping[str, float],
) -> tuple[dict[str, Any], bytes] | None:
    """Everything that it takes to go on from here, and the policy; None if it is not worth keeping."""
    import torch

    if not np.isfinite(algorithm.policy.weights).all():
        logger.warning("weights are not finite any more: no checkpoint is written, the last good one stays")
        return None
    score = metrics.get("eval_return", metrics.get("return_mean", math.nan))
    state = {
        "freerun": VERSION,
        "config": config,
        "update": ledger.version,
        "score": score if math.isfinite(score) else None,
        "wall_seconds": metrics.get("wall_seconds", ledger.seconds_before),
        "lines": {name: file.mark() for name, file in lines.items()},
        "counts": dataclasses.asdict(counts),
        "ledger": ledger.state_dict(),
        "algorithm": algorithm.state_dict(),
        "torch_rng": torch.get_rng_state(),
    }
    return state, pack_policy(algorithm.policy.arrays, algorithm.policy.describe())


def restore(state: Mapping[str, Any], algorithm: Algorithm, ledger: Ledger) -> Start:
    """The algorithm and the books as they were; where collecting goes on."""
    import torch

    try:
        check_fit(state["algorithm"], algorithm.state_dict())
        algorithm.load_state_dict(state["algorithm"])
        torch.set_rng_state(state["torch_rng"])
        ledger.load_state_dict(state["ledger"])
        ledger.seconds_before = float(state["wall_seconds"])
        return ledger.start(Counts(**state["counts"]))
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"the checkpoint does not fit this run: {error}") from None


def _mark(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Where a file stood when the checkpoint was written."""
    try:
        mark = state["lines"][name]
        if isinstance(mark["bytes"], int) and mark["bytes"] >= 0 and isinstance(mark["sha256"], str):
            return dict(mark)
    except (LookupError, TypeError):
        pass
    raise UserError(f"the checkpoint does not fit this run: it does not say where {name}.jsonl stood")


# ---------------------------------------------------------------------------------------------- the parts


def _trackers(run: TrackedRun) -> list[MetricSink]:
    names = dict.fromkeys(run.tracking.track)  # each once
    return [Background(TRACKERS[name].load()(run)) for name in names]


def _display(config: TrainConfig[Any, Any], env: str, budget: Budget, collector: Collector) -> MetricSink:
    console = Console(stderr=True)
    title = f"freerun · {env} · {config.algo} · {config.mode} × {collector.num_workers} · seed {config.seed}"
    if config.display == "classic":
        return ClassicLines(title, collector.counts, config.algorithm.episodes_per_update, Console(width=240))
    if config.display == "rsl-rl":
        return RslRlBlocks(title, Console())
    if config.display == "live" or (config.display == "auto" and console.is_terminal):
        return LiveDisplay(title, budget, collector.counts, console)
    return LogLines(title, Console(file=sys.stderr, width=240))


def _show(folder: RunFolder, quiet: bool, stack: contextlib.ExitStack) -> str:
    """On a web page; its address."""
    page = WebPage(folder.path)
    stack.callback(page.close)
    if not quiet:
        print(f"Watch it at {page.url}", file=sys.stderr)
    return page.url


def _write_trace(folder: RunFolder) -> None:
    recording = Recording.of(folder.path)
    if recording is not None:
        try:
            write_trace(recording, folder.trace_path)
        except OSError as error:
            folder.trace_path.unlink(missing_ok=True)
            logger.warning("%s could not be written: %s", folder.trace_path, error.strerror)


def _gauges(
    config: TrainConfig[Any, Any], collector: Collector, policy: Policy, machine: Machine, step: int
) -> list[Gauge]:
    gauges: list[Gauge] = [machine]
    if config.eval_every is not None:
        env = make_factory(config).make(1)
        gauges.append(Trials(env, policy, config.seed, config.eval_every, config.eval_episodes, step))
    if hasattr(collector, "simulator_log"):
        gauges.append(collector.simulator_log)
    return gauges


def _figures(ledger: Ledger, counts: Counts, incidents: Mapping[str, int], wall_seconds: float) -> dict[str, Any]:
    return {
        "env_steps": ledger.steps,
        "episodes": ledger.episodes,
        "updates": ledger.version,
        "wall_seconds": wall_seconds,
        "steps_per_second": ledger.steps / wall_seconds,
        "episodes_per_second": ledger.episodes / wall_seconds,
        "mean_return": ledger.mean_return if ledger.episodes else None,
        "lag_mean": ledger.lag_mean,
        "lag_max": ledger.lag_max,
        "dropped_steps": counts.steps_dropped,
        "dropped_steps_by_worker": {str(worker): steps for worker, steps in counts.steps_dropped_by_worker.items()},
        "dropped_steps_by_length": {str(length): steps for length, steps in counts.steps_dropped_by_length.items()},
        "drop_bias": counts.drop_bias,
        "segments_rejected": counts.segments_rejected,
        "worker_restarts": counts.worker_restarts,
        "incidents": dict(incidents),
        "ledger": ledger.summary(counts),
    }
