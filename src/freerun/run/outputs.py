"""Everything that a run writes and shows: its folder, checkpoints, metrics, timeline, trackers and display."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from freerun.adapters.tensor_envs import is_only_tensors
from freerun.algorithms.learners.compiled_kernel import set_kernel_threads
from freerun.collecting.rollouts.evaluation_episodes import HeldOutEpisodes, PeriodicEvaluation
from freerun.collecting.scheduling.joint_collector import own_collector
from freerun.core import (
    Collector,
    Gauge,
    HeldOutSeed,
    MetricSink,
    Policy,
    Purpose,
    SimulatorCollector,
    Tunable,
    background_stages,
)
from freerun.persistence import trust
from freerun.persistence.checkpoint import Checkpoint, Checkpoints
from freerun.persistence.checkpoint_sink import CheckpointSink, Interval
from freerun.persistence.files import LineFile
from freerun.persistence.redaction import SecretRedactor, without_secrets
from freerun.persistence.run_folder import RunFolder, pack_policy
from freerun.run import checkpoint_state, displays, self_tuning
from freerun.run.evaluation import play_at_once
from freerun.run.learner_threads import make_learner_threads
from freerun.run.run_parts import RunParts, summarize
from freerun.run.update_hooks import AfterCheckpoint, UpdateHooks
from freerun.settings.config import AnyConfig
from freerun.settings.factories import is_tensors, make_factory, run_seed
from freerun.settings.named_code import code_in
from freerun.settings.registry import situation
from freerun.telemetry.advice import RecentRecords
from freerun.telemetry.finite_guard import FiniteGuard
from freerun.telemetry.log_file import LogFile
from freerun.telemetry.machine_load import MachineLoad
from freerun.telemetry.perfetto_trace import write_trace
from freerun.telemetry.time_shares import TimeShares
from freerun.telemetry.timeline import RecordedTimeline
from freerun.telemetry.timeline_recorder import TimelineRecorder
from freerun.telemetry.tracking import TrackedRun
from freerun.telemetry.update_record import MetricsFile
from freerun.transport.signals import GRACE_SECONDS, interrupt, interruptible

logger = logging.getLogger("freerun")

STAGE_SECONDS = 1.0
"""How long an interrupted run waits for stages that run beside the learner."""
POLL_SECONDS = 0.05
"""How often `abandon` looks whether the learner has finished its update."""


class RunOutputs:
    """Opens everything that a run writes to, and closes all of it at the end, even if opening fails halfway."""

    def __init__(
        self,
        parts: RunParts,
        folder: RunFolder,
        resumed: Checkpoint | None,
        hooks: UpdateHooks,
        is_follower: bool = False,
    ):
        """A follower (any but the first of several learners) writes no checkpoints and ignores interrupts."""
        self._parts = parts
        self._hooks = hooks
        self._folder = folder
        self._is_follower = is_follower
        # A run folder may be moved or copied, so its files do not say where it is.
        self._settings = without_secrets({**parts.settings, "run_dir": None})
        self._redactor = SecretRedactor(parts.settings)
        self._tunables: list[Tunable] = []
        self.page: str | None = None
        """The address of the web page that shows the run, with --watch."""
        self.is_complete = True
        """False if the disk did not take everything."""
        with ExitStack() as stack:
            self._open(stack, resumed)
            # All is open: from now on `__exit__` closes it. If something has failed, the `with` has closed the rest.
            self._stack = stack.pop_all()
        self._began = time.perf_counter()

    # The stack closes in reverse order: gauges first, then sinks and files, and the claim on the folder last.
    def _open(self, stack: ExitStack, resumed: Checkpoint | None) -> None:
        parts, config, folder = self._parts, self._parts.config, self._folder
        if resumed is None:
            folder.create()
            stack.callback(folder.claim())
        # Whoever resumes or evaluates this run on this machine need not trust its code again.
        trust.sign(folder.path, code_in(self._settings))
        parts.incidents.open(folder.path, self._redactor.redact)
        stack.callback(LogFile(folder.log_path, self._redactor.redact).close)
        tracked = TrackedRun(folder.path, self._settings, config.tracking, self._redactor.has_secrets)
        trackers = displays.make_trackers(tracked)
        self._lines = {
            name: LineFile(
                folder.path / f"{name}.jsonl", checkpoint_state.file_mark(resumed.state, name) if resumed else None
            )
            for name in ("metrics", "ledger")
        }
        parts.ledger.write_to(self._lines["ledger"])
        if config.watch:
            self.page = displays.open_page(folder.path, config.quiet, stack)
        known = replace(situation(parts.settings, _has_idle_gpu(config)), act_seconds=parts.act_seconds)
        self._recent = RecentRecords(known)
        self._checkpoints = self._make_checkpoint_sink(resumed)
        # With --adapt the number of workers changes: shares of busy time refer to those that are active.
        num_active = (lambda: parts.collector.num_workers) if config.adapting.adapt else None
        self.shares = TimeShares(len(parts.tracks.workers), parts.tracks, num_active)
        display: list[MetricSink] = []
        if not config.quiet:
            display = displays.make_display(parts, lambda: self.shares.activity, self._recent)
        for sink in display:  # displays have threads, which must end even if something below fails
            stack.callback(sink.close)
        guard = FiniteGuard(parts.ledger, config.on_nan or "stop", run_seed(config), parts.incidents)
        # The checkpoint comes after the files of lines, because it notes where they end.
        self.sinks: list[MetricSink] = [MetricsFile(self._lines["metrics"]), guard, *display]
        self.sinks += [self._recent, *trackers, self._hooks, self._checkpoints]
        self._checkpoints.save()  # from now on the run can be resumed
        folder.write_config(self._settings)
        # Results of an earlier end would contradict the run that continues now.
        folder.drop_results()
        # cuda:1 -> GPU 1, cuda -> GPU 0.
        machine = MachineLoad(int(config.device.partition(":")[2] or 0) if config.device.startswith("cuda") else None)
        self.gauges = _make_gauges(parts, machine)
        timeline = TimelineRecorder(folder.timeline_path, parts.tracks, parts.collector.counts, machine)
        stack.callback(_write_trace, folder)
        stack.callback(timeline.close)
        if config.adapting.adapt:
            adapted = resumed.state.get("adapted", {}) if resumed is not None else {}
            self._tunables = self_tuning.find_tunables(parts, adapted)
            adapter = self_tuning.make_live_tuner(parts, self._tunables, machine, folder.path)
            self.sinks.append(adapter)
            self.gauges.append(adapter)
        stack.callback(set_kernel_threads, 1)  # threads that only wait have no business outside of a run
        threads = make_learner_threads(parts, machine.read)
        if threads is not None:
            self.sinks.append(threads)
            self.gauges.append(threads)
        self.sinks.append(AfterCheckpoint(self._hooks))
        own_sinks = [sink for sink in self.sinks if sink not in display]
        closing = [part.close for part in self._lines.values()] + [part.close for part in own_sinks]
        for close in (*closing, *(gauge.close for gauge in self.gauges)):
            stack.callback(close)

    def _make_checkpoint_sink(self, resumed: Checkpoint | None) -> CheckpointSink:
        config, ledger = self._parts.config, self._parts.ledger
        return CheckpointSink(
            Checkpoints(self._folder.path, config.keep_checkpoints, resumed),
            Interval.read(config.checkpoint_every),
            ledger,
            self._state,
            ledger.steps,
            is_resumed=resumed is not None,
            long_seconds=GRACE_SECONDS,
        )

    def _state(self, metrics: Mapping[str, float]) -> tuple[dict[str, Any], bytes] | None:
        if self._is_follower:
            return None
        state = checkpoint_state.capture(self._parts, self._settings, self._lines, metrics)
        return None if state is None else (state | self._adapted() | self._hooks.state(), self._packed_policy())

    def _adapted(self) -> dict[str, Any]:
        """Return the values that --adapt has reached, for the checkpoint and the summary; nothing without --adapt."""
        return {"adapted": {tunable.name: tunable.read() for tunable in self._tunables}} if self._tunables else {}

    def _packed_policy(self) -> bytes:
        policy = self._parts.algorithm.policy
        return pack_policy(policy.arrays, policy.describe(), self._parts.spaces)

    # ------------------------------------------------------------------------------------------ the end of a run

    def interruptible(self) -> AbstractContextManager[Any]:
        """Return a context in which Ctrl-C and SIGTERM let the update finish, for a few seconds; a second one ends the
        run."""
        if self._is_follower:
            return contextlib.nullcontext()
        return interruptible(lambda: self._checkpoints.can_save, self._checkpoints.ask_to_stop)

    def finish(self, outcome: str, error: str | None, reason: str | None = None) -> dict[str, Any]:
        """Save what was learned, and return the summary of the run. `reason` is why a callback has ended it."""
        # An update that was cut off has changed some weights and not others.
        is_half_done = outcome == "interrupted" and not self._comes_to_rest()
        wall_seconds = self._parts.ledger.seconds_before + time.perf_counter() - self._began
        summary = summarize(self._parts, outcome, self._redactor.redact(error) if error else error, wall_seconds)
        summary |= {**self._adapted(), **self._hooks.summary(), "advice": self._recent.advice()}
        summary |= {} if reason is None else {"reason": reason}
        has_checkpoint = is_half_done or self._checkpoints.save()
        policy = (self._saved_policy() if is_half_done else None) or self._packed_policy()
        self.is_complete = self._folder.write_results(policy, summary) and has_checkpoint
        return summary

    def _comes_to_rest(self) -> bool:
        """True if no update is half done, and all stages beside the learner end by themselves.

        Stages that do not end are interrupted, because Python would wait for their threads before it exits.
        """
        is_at_rest = self._checkpoints.can_save
        stages = background_stages(self._parts.algorithm).values()
        late = [stage for stage in stages if not stage.ends_within(STAGE_SECONDS if is_at_rest else 0.0)]
        for stage in late:
            if stage.thread is not None:
                interrupt(stage.thread)
        return is_at_rest and not late

    def _saved_policy(self) -> bytes | None:
        """Return the policy of the last whole update. Half of an update must be neither a checkpoint nor the final
        policy."""
        if self._is_follower:
            return None
        logger.warning(
            "the run was interrupted in the middle of update %d, which is given up: --resume goes on after update %d",
            self._parts.ledger.version + 1,
            self._checkpoints.saved_update,
        )
        return self._checkpoints.saved_policy()

    def abandon(self, failure: Exception) -> None:
        """Save what was learned, print why, and end the process: the thread that should do it is stuck for good."""
        try:
            # The learner runs in another thread: let it finish its update, for a while.
            self._checkpoints.ask_to_stop()
            deadline = time.monotonic() + GRACE_SECONDS
            while not self._checkpoints.can_save and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            self.finish("failed", str(failure))
            self._stack.close()
        finally:
            print(f"freerun: {failure}", file=sys.stderr, flush=True)
            # A normal exit would wait for the stuck thread.
            os._exit(1)

    def __enter__(self) -> RunOutputs:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _make_gauges(parts: RunParts, machine: MachineLoad) -> list[Gauge]:
    config, collector = parts.config, own_collector(parts.collector)
    gauges: list[Gauge] = [machine]
    if config.eval_every is not None:
        gauges.append(_make_evaluation(parts, collector, config.eval_every))
    if isinstance(collector, SimulatorCollector):
        gauges.append(collector.simulator_log)
    return gauges


def _make_evaluation(parts: RunParts, collector: Collector, every_steps: int) -> Gauge:
    """--eval-every: on an environment of its own, or on the simulator that trains, if a process can have only one."""
    config, policy, first_step = parts.config, parts.algorithm.policy, parts.ledger.steps
    if is_only_tensors(config.env) and isinstance(collector, SimulatorCollector):
        play = functools.partial(collector.evaluate, num_episodes=config.eval_episodes)
        return PeriodicEvaluation(play, policy, every_steps, first_step)
    if is_tensors(config):
        # On the CPU, where a few environments are stepped in less time than a GPU takes to start their kernels.
        on_cpu, seed = replace(config, device="cpu"), HeldOutSeed(config.seed, Purpose.VALIDATION)

        def play_again(policy: Policy) -> list[float]:
            return play_at_once(on_cpu, config.eval_episodes, seed, lambda _: policy).returns

        return PeriodicEvaluation(play_again, policy, every_steps, first_step)
    episodes = HeldOutEpisodes(make_factory(config).make(1), config.seed, config.eval_episodes)
    return PeriodicEvaluation(episodes, policy, every_steps, first_step, episodes.close)


def _has_idle_gpu(config: AnyConfig) -> bool:
    import torch

    return not config.device.startswith("cuda") and torch.cuda.is_available()


def _write_trace(folder: RunFolder) -> None:
    """Write the timeline once more in the format of Perfetto."""
    recording = RecordedTimeline.of(folder.path)
    if recording is not None:
        try:
            write_trace(recording, folder.trace_path)
        except OSError as error:
            folder.trace_path.unlink(missing_ok=True)
            logger.warning("%s could not be written: %s", folder.trace_path, error.strerror)
