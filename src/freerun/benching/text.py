"""The comparison in a terminal and as Markdown."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from freerun.benching import analysis
from freerun.benching.analysis import Row, clock, counted, percent
from freerun.benching.noise import Range
from freerun.benching.results import Results

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


def cells(row: Row) -> list[str]:
    return [
        row.label,
        ranged(row.steps, row.num_runs),
        f"{row.episodes:,.1f}",
        speed_up(row),
        percent(row.of_bare),
        percent(row.of_cores),
        f"{row.startup_seconds:.1f}",
        f"{row.memory_megabytes:,.0f}",
        f"{row.cpu_percent:.0f} %",
        clock(row.many_episodes_seconds),
    ]


def ranged(rate: Range, num_runs: int) -> str:
    between = f" ({rate.low:,.0f}–{rate.high:,.0f})" if num_runs > 1 else ""
    return f"{rate.middle:,.0f}{between}"


def speed_up(row: Row) -> str:
    if row.speed_up is None:
        return "–"
    if row.label == "sequential":
        return "1"
    return analysis.factor(row.speed_up).removesuffix(" ×") if row.speed_up_called else "≈ 1"


def print_results(results: Results, console: Console) -> None:
    for number in results.options.numbers():
        table = Table(title=_title(results, number), title_justify="left", box=box.SIMPLE_HEAD)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
        for row in analysis.rows(results, number):
            style = {"fastest": "bold green", "as fast": "green"}.get(row.standing)
            table.add_row(*cells(row), style=style)
        console.print(table)
    for line in sentences(results):
        console.print(line, highlight=False, markup=False)


def _title(results: Results, number: int) -> str:
    limit = analysis.limits(results, number)
    bare = "" if limit is None else f"; bare limit {ranged(limit.bare, len(limit.bare_runs))} steps/s"
    return f"{results.options.env}, {counted(number)}{bare}"


def sentences(results: Results) -> list[str]:
    lines = [analysis.verdict(results, number) for number in results.options.numbers()]
    found = analysis.machine_noise(results)
    lines += [str(found)] if found is not None else []
    return lines + analysis.left_out(results)


def markdown(results: Results) -> str:
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
    best = analysis.best_row(results)
    if best is not None:
        lines += ["", "To train the fastest way:", "", f"    {analysis.command(results, best)}"]
    return "\n".join([*lines, "", *(f"{line}  " for line in how(results))]) + "\n"


def how(results: Results) -> list[str]:
    """What the figures mean."""
    options = results.options
    return [
        f"Every run is a process of its own; modes take turns, up to {options.repeats} times. Shown are medians "
        "(lowest–highest).",
        f"The work is the same in every mode: PPO trains all the while, {options.num_epochs} epochs over the steps of "
        "an update, at a learning rate so small that episodes stay as they are. Modes that step environments one after "
        "another (sequential, batch) get smaller updates, for they would not end one in time.",
        f"Measured from the end of an update to that of another, {options.seconds:g} s or more, after two to get warm.",
        "Of bare: as a share of as many processes that only step environments, with random actions drawn before.",
        "Of cores: as a share of what as many environments could do if none was in another's way, or of what all cores "
        "can compute, whichever is lower.",
        "A difference is called one only where the runs of two modes lie apart, each taken at least as wide as the "
        "spread of the bare limit (10 % where something was measured once).",
        "Memory: of all processes, what they share counted once. CPU: of all cores. 100k episodes: with the start.",
    ]
