"""Runs `freerun bench`: it measures, or continues an earlier bench, and writes the reports."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from freerun.core import UserError
from freerun.persistence import trust
from freerun.persistence.files import read_json, write_atomically
from freerun.persistence.redaction import refuse_redacted
from freerun.tools.bench import analysis, text_report
from freerun.tools.bench.bench_cases import Bench, prepare
from freerun.tools.bench.bench_options import BenchOptions, code_in_bench
from freerun.tools.bench.html_report import page
from freerun.tools.bench.results import FILE_NAME, Results, check_changes


def bench(
    options: BenchOptions, print_line: Callable[[str], None], resumed: Results | None = None
) -> tuple[Results, Path]:
    """Measure everything that an earlier bench has not. After Ctrl-C, the reports hold what was measured until then."""
    name = f"bench-{re.sub(r'[^A-Za-z0-9.-]+', '-', options.env)}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = options.output or Path("runs") / name
    # An earlier bench must not be overwritten by accident.
    if resumed is None and (folder / "report.json").exists():
        raise UserError(f"{folder} holds a bench already: continue it with --resume {folder}, or name another --output")
    refuse_redacted(asdict(options))  # a resumed bench lacks the secrets that its report must not hold
    results = prepare(options)
    if resumed is not None:
        _add_earlier_runs(results, resumed)
    try:
        Bench(results, folder, print_line).run()
    except KeyboardInterrupt:
        if not results.any_runs:  # there is nothing to report
            raise
        print_line("Interrupted: what was measured is kept.")
    write_reports(results, folder)
    return results, folder


def _add_earlier_runs(results: Results, earlier: Results) -> None:
    """Add the runs of an earlier bench. Its machine and its work must be the same."""
    check_changes(earlier.options, results.options)
    for name in ("cores", "processor", "python", "freerun"):
        if earlier.machine[name] != results.machine[name]:
            raise UserError(
                f"that bench was measured with {name} {earlier.machine[name]}, and this is {results.machine[name]}: "
                "figures of two machines cannot be compared, so start another bench"
            )
    for case in results.cases:
        found = earlier.case(case.label, case.num_workers)
        if found is not None:
            # The problem is not taken over: a case that failed before is tried again.
            case.runs, case.steps_per_update = found.runs, found.steps_per_update
    results.seconds, results.date = earlier.seconds, earlier.date


def write_reports(results: Results, folder: Path) -> None:
    """Write report.json, report.md and report.html."""
    results.write(folder, {"tables": _tables(results), "sentences": text_report.sentences(results)})
    try:
        write_atomically(folder / "report.md", text_report.markdown(results).encode())
        write_atomically(folder / "report.html", page(results, folder).encode())
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None


def _tables(results: Results) -> list[dict[str, Any]]:
    """Return the tables of the reports as data, for other programs."""
    found = []
    for number in results.options.numbers():
        limit = analysis.limits(results, number)
        if limit is not None:
            rows = [asdict(row) for row in analysis.rows(results, number)]
            found.append({"num_workers": number, "limits": {**asdict(limit), "spread": limit.spread}, "rows": rows})
    return found


def resumed_options(folder: Path, named: Collection[str]) -> tuple[BenchOptions, Results]:
    """Return the settings of an earlier bench, and what it has measured. `named` is the code that the user trusts."""
    options = read_json(folder / FILE_NAME).get("options")
    # Before the results are read, because reading them imports the modes.
    trust.check(code_in_bench(options if isinstance(options, dict) else {}), folder, named)
    results = Results.read(folder)
    return dataclasses.replace(results.options, output=folder), results
