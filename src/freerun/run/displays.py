"""What a person sees of a run: a live display or lines in the terminal, a web page, and external trackers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from freerun.core import MetricSink
from freerun.run.run_parts import RunParts
from freerun.settings.factories import episode_remedy, is_tensors, settings_in_use
from freerun.settings.registry import find_algorithm, find_mode, find_tracker
from freerun.telemetry.advice import RecentRecords
from freerun.telemetry.classic_lines import ClassicLines
from freerun.telemetry.rsl_rl_console import RslRlBlocks
from freerun.telemetry.terminal import LiveDisplay, LogLines
from freerun.telemetry.time_shares import LearnerActivity
from freerun.telemetry.tracking import BackgroundSink, TrackedRun
from freerun.telemetry.waiting import WaitingLines, WaitingStatus
from freerun.telemetry.web_page import WebPage

LINE_WIDTH = 240
"""Log lines are not wrapped at the width of the terminal, because files and other programs read them too."""


def make_display(parts: RunParts, activity: Callable[[], LearnerActivity], recent: RecentRecords) -> list[MetricSink]:
    """Make what the terminal shows. Beside plain lines, a thread says what a silent run is waiting for."""
    config, collector = parts.config, parts.collector
    console = Console(stderr=True)
    title = _title(parts)
    # Several learners exchange their counts only after an update, so there is nothing to show in between.
    counts = collector.counts if config.num_learners == 1 else None
    own_line = find_algorithm(config.algo).traits.console_line
    waiting = WaitingStatus(activity, counts, functools.partial(episode_remedy, config))
    if config.display == "live" or (config.display == "auto" and console.is_terminal):
        return [LiveDisplay(title, parts.budget, waiting, recent.advice, collector.counts, console, own_line)]
    lines: MetricSink
    if config.display == "classic":
        takes_turns = find_mode(config.mode).traits.takes_turns
        num_episodes = config.algorithm.episodes_per_update
        lines = ClassicLines(title, collector.counts, num_episodes, Console(width=LINE_WIDTH), takes_turns)
    elif config.display == "rsl-rl":
        lines = RslRlBlocks(title, Console())
    else:
        lines = LogLines(title, Console(file=sys.stderr, width=LINE_WIDTH), own_line)
    return [lines, WaitingLines(waiting, Console(file=sys.stderr, width=LINE_WIDTH))]


def _title(parts: RunParts) -> str:
    config = parts.config
    how = f"{config.mode} × {parts.collector.num_workers}"
    if is_tensors(config):
        how = f"{config.mode}, {config.collector.num_envs:,} environments as tensors on {config.device}"
    title = f"freerun · {parts.settings['env']} · {config.algo} · {how} · seed {config.seed}"
    note = find_algorithm(config.algo).traits.learner_note
    if note is None:
        return title
    return f"{title} · {note(settings_in_use(config, parts.algorithm), config.device)}"


def make_trackers(run: TrackedRun) -> list[MetricSink]:
    """Make the trackers of --track, each once. A slow tracker works in the background."""
    return [BackgroundSink(find_tracker(name).load()(run)) for name in dict.fromkeys(run.tracking.track)]


def open_page(run_dir: Path, quiet: bool, stack: ExitStack) -> str:
    """Show the run on a web page until the stack is closed, and return its address."""
    page = WebPage(run_dir)
    stack.callback(page.close)
    if not quiet:
        print(f"Watch it at {page.url}", file=sys.stderr)
    return page.url
