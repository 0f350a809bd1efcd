"""Writes the comparison to a terminal and as Markdown."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from freerun.tools.bench import analysis
from freerun.tools.bench.analysis import ReportRow, clock, number_text, percent
from freerun.tools.bench.noise import Range
from freerun.tools.bench.results import SEQUENTIAL, Results

COLUMNS = (
    "mode",
    "steps/s",
    "episodes/s",
    "× sequential",
    "of bare",
    "of cores",
    "start-up s",
    "memory MB",
    "CPU",
    "100k episodes",
)


def cells(row: ReportRow) -> list[str]:
    """Return the text of each of the COLUMNS."""
    return [
        row.label,
        range_text(row.steps, row.num_runs),
        f"{row.episodes:,.1f}",
        speed_up(row),
        percent(row.of_bare),
        "–" if row.of_cores is None else percent(row.of_cores),
        f"{row.startup_seconds:.1f}",
        f"{row.memory_megabytes:,.0f}",
        f"{row.cpu_percent:.0f} %",
        clock(row.many_episodes_seconds),
    ]


def range_text(rate: Range, num_runs: int) -> str:
    """Write the median, and the lowest and the highest where there were several runs."""
    between = f" ({rate.low:,.0f}–{rate.high:,.0f})" if num_runs > 1 else ""
    return f"{rate.middle:,.0f}{between}"


def speed_up(row: ReportRow) -> str:
    """Write the speed-up over `sequential`; `≈ 1` where it lies within the noise."""
    if row.speed_up is None:
        return "–"
    if row.label == SEQUENTIAL:
        return "1"
    return analysis.factor(row.speed_up).removesuffix(" ×") if row.speed_up_called else "≈ 1"


def print_results(results: Results, console: Console) -> None:
    """Print a table for each number of workers, and the sentences below them."""
    for number in results.options.numbers():
        table = Table(title=_title(results, number), title_justify="left", box=box.SIMPLE_HEAD)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
        for row in analysis.rows(results, number):
            # As in the page: green for the fastest and for modes within its noise.
            style = {"fastest": "bold green", "as fast": "green"}.get(row.standing)
            table.add_row(*cells(row), style=style)
        console.print(table)
    for line in sentences(results):
        # Names of environments may hold brackets, which rich would take for markup.
        console.print(line, highlight=False, markup=False)
    advice, command = analysis.recommendation(results)
    console.print(advice, highlight=False, markup=False)
    if command is not None:
        # Without line breaks, so that the command can be copied.
        console.print(command, soft_wrap=True, highlight=False, markup=False)


def _title(results: Results, number: int) -> str:
    limit = analysis.limits(results, number)
    bare = "" if limit is None else f"; bare limit {range_text(limit.bare, len(limit.bare_runs))} steps/s"
    return f"{results.options.env}, {number_text(results, number)}{bare}"


def sentences(results: Results) -> list[str]:
    """Return what all reports say about the tables."""
    lines = [analysis.verdict(results, number) for number in results.options.numbers()]
    found = analysis.machine_noise(results)
    lines += [str(found)] if found is not None else []
    return lines + analysis.left_out(results)


def markdown(results: Results) -> str:
    """Return `report.md`."""
    machine = results.machine
    lines = [
        f"# {results.options.env}: every way of collecting",
        "",
        f"{machine['cores']} cores ({machine['processor']}), Python {machine['python']}, freerun {machine['freerun']}, "
        f"{results.date}; `freerun bench` wrote this in {results.seconds / 60:.1f} minutes.",
        "",
        *(f"- {line}" for line in sentences(results)),
    ]
    for number in results.options.numbers():
        table = analysis.rows(results, number)
        if table:
            lines += ["", f"## {_title(results, number)}", "", f"| {' | '.join(COLUMNS)} |"]
            lines.append("| --- |" + " ---: |" * (len(COLUMNS) - 1))
            lines += [f"| {' | '.join([f'`{row.label}`', *cells(row)[1:]])} |" for row in table]
    advice, command = analysis.recommendation(results)
    lines += ["", advice, *(["", f"    {command}"] if command else [])]
    return "\n".join([*lines, "", *(f"{line}  " for line in method_notes(results))]) + "\n"


def method_notes(results: Results) -> list[str]:
    """Say how the figures were measured and what they mean."""
    options = results.options
    limits = [
        "Of bare: the share of the rate of as many processes that only step environments, with random actions drawn in "
        "advance.",
        "Of cores: the share of the rate that as many environments would reach if none slowed another down, or that "
        "all cores can compute, whichever is lower.",
    ]
    if options.is_tensors:
        limits = [
            f"Environments are tensors on {options.device}. Of bare: the share of the rate of the simulator alone, "
            "stepped with random actions in segments as the modes collect them."
        ]
    return [
        f"Every run has its own process, and the modes take turns, up to {options.repeats} times. The tables show "
        "medians (lowest–highest).",
        f"The work is the same in every mode: PPO trains all the while, {options.num_epochs} epochs over the steps of "
        "an update, at a learning rate so small that episodes stay as they are. Modes that step environments one after "
        "another (sequential, batch) get smaller updates, for they would not end one in time.",
        f"A run is measured from the end of one update to the end of another, at least {options.seconds:g} s later, "
        "after two updates to warm up.",
        *limits,
        "Two modes count as different only where the ranges of their runs lie apart. Each range is at least as wide as "
        "the spread of the bare limit (10 % where something was measured once).",
        "Memory is that of all processes, with shared memory counted once. CPU is the share of all cores. 100k "
        "episodes include the start.",
    ]
