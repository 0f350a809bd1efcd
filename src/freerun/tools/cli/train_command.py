"""`freerun train`."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from freerun.tools.cli import INTERRUPTED, report_console, simulator_start


def train(words: list[str]) -> int:
    """Train an agent on an environment."""
    task = simulator_start.start(words)  # Isaac Sim must be started before torch is imported
    from freerun import experiment
    from freerun.run import resume
    from freerun.tools.cli.train_flags import Flags
    from freerun.tools.probe import auto_mode
    from freerun.tools.probe.device_choice import choose_device
    from freerun.transport import learner_place

    # When Python exits, it searches all objects for garbage. With torch loaded this takes seconds on a busy machine,
    # and an interrupted run must end within five. Frozen objects are not searched.
    atexit.register(gc.freeze)
    # Pre-emptible machines and `timeout` send SIGTERM: it ends a run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not learner_place.is_first():  # torchrun signals all learners: the others end with the first
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    flags = Flags.read(words, task)
    config = auto_mode.settle(flags.options, flags.config, flags.given) if flags.is_open else flags.config()
    if flags.resumed is None:
        config = choose_device(config)
    # A folder that is resumed without a checkpoint of its own is that of a series.
    if len(config.env_settings.series()) > 1 or (flags.resumes and flags.resumed is None):
        return _train_series(config)
    if flags.resumed is not None and (sentence := resume.nothing_left(config, flags.resumed)) is not None:
        if learner_place.is_first():
            print(sentence)
        return 0
    result = experiment.run(config, resumed=flags.resumed)
    summary = result.summary
    # With torchrun every learner runs this: only the first one prints.
    if not learner_place.is_first():
        return INTERRUPTED if summary["outcome"] == "interrupted" else 0
    _print_words(_sentence(summary), Console())
    print(f"Run folder: {result.run_dir}  (freerun eval {result.run_dir})")
    if not config.quiet:
        _print_timeline(result.run_dir, summary["advice"])
    if result.page is not None and sys.stdin.isatty() and summary["outcome"] == "finished":
        # Somebody sits at this terminal and may still look at the page.
        _show_on(result.page, result.run_dir)
    if not result.is_kept:
        print("freerun: not everything could be written to the run folder, see above", file=sys.stderr)
    return INTERRUPTED if summary["outcome"] == "interrupted" else 0 if result.is_kept else 1


def _sentence(summary: Mapping[str, Any]) -> str:
    """Describe how a run went. Its steps are those that were learned from."""
    mean = summary["mean_return"]
    return (
        f"{summary['outcome'].capitalize()}{f' ({reason})' if (reason := summary.get('reason')) else ''}: "
        f"{summary['env_steps']:,} steps, "
        f"{summary['episodes']:,} episodes, {summary['updates']} updates in {summary['wall_seconds']:.1f} s "
        f"({summary['steps_per_second']:,.0f} steps/s, {summary['episodes_per_second']:,.1f} episodes/s); "
        + ("no episode has ended" if mean is None else f"mean return {mean:.2f}")
    )


def _print_words(text: str, console: Console) -> None:
    """Print with line breaks between words in a terminal, and as one line in a file."""
    console.print(text, soft_wrap=not console.is_terminal, highlight=False, markup=False)


def _show_on(address: str, run_dir: Path) -> None:
    """Keep the web page at the same address until the user ends it."""
    from urllib.parse import parse_qs, urlsplit

    from freerun.tools.watch.server import serve

    parts = urlsplit(address)
    print(f"The page stays at {address} until Ctrl-C.")
    serve([run_dir], port=parts.port, token=parse_qs(parts.query)["token"][0], announce=lambda url: None)


def _print_timeline(run_dir: Path, advice: str | None) -> None:
    from freerun.telemetry.timeline import RecordedTimeline
    from freerun.telemetry.timeline_chart import chart

    recording = RecordedTimeline.of(run_dir)
    if recording is not None:
        console = report_console(160, stderr=True)
        console.print(chart(recording, console.width))
        if advice:
            _print_words(f"Advice: {advice}", console)


def _train_series(config: Any) -> int:
    from freerun.run.series import run_series

    results = run_series(config)
    if not results:
        print(f"All {config.env_settings.series_fields[0]}s were trained before.")
        return 0
    print(f"Run folders: {results[0].run_dir.parent}")
    return INTERRUPTED if results[-1].summary["outcome"] == "interrupted" else 0
