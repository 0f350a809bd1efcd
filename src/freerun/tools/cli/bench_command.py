"""`freerun bench`."""

from __future__ import annotations

import dataclasses
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from freerun.settings.flag_parsing import parse, parse_known
from freerun.tools.cli import INTERRUPTED, Trusted, report_console


@dataclass(frozen=True)
class _FirstBenchFlags:
    """What must be known before the other flags can be parsed: an earlier bench has its own settings."""

    resume: Path | None = None
    trust: Trusted = ()


def bench(words: list[str]) -> int:
    """Measure every way of collecting on an environment, and compare them with the limit of the machine."""
    from freerun.tools.bench.bench_options import BenchOptions
    from freerun.tools.bench.bench_run import bench as run_bench
    from freerun.tools.bench.bench_run import resumed_options
    from freerun.tools.bench.text_report import print_results

    # SIGTERM ends a bench as Ctrl-C does: what was measured is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    first, rest = parse_known(_FirstBenchFlags, words)
    # Whoever types a name trusts it.
    named = [*first.trust, *rest]
    default, earlier = (None, None) if first.resume is None else resumed_options(first.resume, named)
    options: BenchOptions = parse(
        BenchOptions,
        rest,
        prog="freerun bench",
        description=f"{bench.__doc__} --resume FOLDER continues a bench that was stopped; with more --repeats, "
        "--modes or --workers it measures more. --trust NAME allows code that a folder from elsewhere names.",
        # tyro would make a flag for each name in a dictionary that is not empty.
        default=tyro.MISSING_NONPROP if default is None else dataclasses.replace(default, env_args={}),
    )
    if default is not None and not options.env_args:
        options = dataclasses.replace(options, env_args=default.env_args)
    results, folder = run_bench(options, lambda line: print(line, file=sys.stderr, flush=True), earlier)
    print_results(results, report_console(160))
    print(f"Report: {folder / 'report.html'} (and report.md, report.json)")
    if results.outcome != "finished":
        print(f"Measure the rest: freerun bench --resume {folder}")
    return INTERRUPTED if results.outcome == "interrupted" else 0
