"""`freerun bench`: measures, goes on where an earlier bench was stopped, and writes the reports."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from freerun.benching import analysis, text
from freerun.benching.options import BenchOptions
from freerun.benching.page import page
from freerun.benching.results import Results, check_changes
from freerun.benching.running import Bench, prepare
from freerun.core import UserError
from freerun.persistence.files import write_atomically


def bench(options: BenchOptions, tell: Callable[[str], None], resumed: Results | None = None) -> tuple[Results, Path]:
    """Measure all that is not there yet. Ctrl-C ends it early: what was measured is reported all the same."""
    name = f"bench-{re.sub(r'[^A-Za-z0-9.-]+', '-', options.env)}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = options.output or Path("runs") / name
    if resumed is None and (folder / "report.json").exists():
        raise UserError(f"{folder} holds a bench already: go on with it by --resume {folder}, or name another --output")
    results = prepare(options)
    if resumed is not None:
        take_over(results, resumed)
    try:
        Bench(results, folder, tell).run()
    except KeyboardInterrupt:
        if not results.any_runs:
            raise
        tell("Interrupted: what was measured is kept.")
    write_reports(results, folder)
    return results, folder


def take_over(results: Results, earlier: Results) -> None:
    """What was measured before counts, on the same machine and at the same work."""
    check_changes(earlier.options, results.options)
    for name in ("cores", "processor", "python", "freerun"):
        if earlier.machine[name] != results.machine[name]:
            raise UserError(
                f"that bench was measured with {name} {earlier.machine[name]}, and this is {results.machine[name]}: "
                "figures of two machines are not to be mixed, so start another bench"
            )
    for case in results.cases:
        found = earlier.case(case.label, case.num_workers)
        if found is not None:
            case.runs, case.steps_per_update = found.runs, found.steps_per_update
    results.seconds, results.date = earlier.seconds, earlier.date


def write_reports(results: Results, folder: Path) -> None:
    results.write(folder, {"tables": _tables(results), "sentences": text.sentences(results)})
    try:
        write_atomically(folder / "report.md", text.markdown(results).encode())
        write_atomically(folder / "report.html", page(results, folder).encode())
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None


def _tables(results: Results) -> list[dict[str, Any]]:
    """What the reports show, for other programs."""
    found = []
    for number in results.options.numbers():
        limit = analysis.limits(results, number)
        if limit is not None:
            rows = [asdict(row) for row in analysis.rows(results, number)]
            found.append({"num_workers": number, "limits": {**asdict(limit), "spread": limit.spread}, "rows": rows})
    return found


def resumed_options(folder: Path) -> tuple[BenchOptions, Results]:
    """The settings of a bench that was stopped, and what it has measured."""
    results = Results.read(folder)
    return dataclasses.replace(results.options, output=folder), results
