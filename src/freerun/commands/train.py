"""`freerun train`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from freerun.commands import INTERRUPTED, simulator


def train(words: list[str]) -> int:
    """Train an agent on an environment."""
    task = simulator.start(words)
    from freerun import experiment, learners
    from freerun.flags import Flags
    from freerun.probing import auto

    # Pre-emptible machines and `timeout` send SIGTERM: it ends a run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not learners.is_first():  # torchrun sends signals to all: the others end with the first
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    flags = Flags.read(words, task)
    config = auto.settle(flags.options, flags.config) if flags.is_open else flags.config()
    if len(config.cyber.orders()) > 1 or (flags.resumes and flags.resumed is None):
        return _train_workflows(config)
    result = experiment.run(config, resumed=flags.resumed)
    summary = result.summary
    if not learners.is_first():
        return INTERRUPTED if summary["outcome"] == "interrupted" else 0
    print(
        f"{summary['outcome'].capitalize()}: {summary['env_steps']:,} steps, "
        f"{summary['episodes']:,} episodes, {summary['updates']} updates in {summary['wall_seconds']:.1f} s "
        f"({summary['steps_per_second']:,.0f} steps/s, {summary['episodes_per_second']:,.1f} episodes/s); "
        f"mean return {'-' if summary['mean_return'] is None else format(summary['mean_return'], '.2f')}\n"
        f"Run folder: {result.run_dir}  (freerun eval {result.run_dir})"
    )
    if not config.quiet:
        _print_timeline(result.run_dir, summary["advice"])
    if result.page is not None and sys.stdin.isatty() and summary["outcome"] == "finished":
        _show_on(result.page, result.run_dir)
    if not result.is_kept:
        print("freerun: not everything could be written to the run folder, see above", file=sys.stderr)
    return INTERRUPTED if summary["outcome"] == "interrupted" else 0 if result.is_kept else 1


def _show_on(address: str, run_dir: Path) -> None:
    """The page goes on, at the same address, as long as the user wants."""
    from urllib.parse import parse_qs, urlsplit

    from freerun.watch.server import serve

    parts = urlsplit(address)
    print(f"The page stays at {address} until Ctrl-C.")
    serve([run_dir], port=parts.port, token=parse_qs(parts.query)["token"][0], announce=lambda url: None)


def _print_timeline(run_dir: Path, advice: str | None) -> None:
    from freerun.telemetry.chart import chart
    from freerun.telemetry.timeline import Recording

    recording = Recording.of(run_dir)
    if recording is not None:
        console = Console(stderr=True)
        console = console if console.is_terminal else Console(stderr=True, width=160)
        console.print(chart(recording, console.width))
        if advice:
            console.print(f"Advice: {advice}", highlight=False, markup=False)


def _train_workflows(config: Any) -> int:
    from freerun.series import run_workflows

    results = run_workflows(config)
    if not results:
        print("All workflows were trained before.")
        return 0
    print(f"Run folders: {results[0].run_dir.parent}")
    return INTERRUPTED if results[-1].summary["outcome"] == "interrupted" else 0
