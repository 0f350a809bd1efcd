"""Writes `report.html`: one file without scripts or network, for light and dark screens, phones and paper."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from freerun.tools.bench import analysis, text_report
from freerun.tools.bench.analysis import Limits, ReportRow, counted, number_text, percent
from freerun.tools.bench.bench_cases import TIMELINES
from freerun.tools.bench.bench_job import PICTURE_SECONDS
from freerun.tools.bench.results import SEQUENTIAL, Results
from freerun.tools.plots.drawing import LINE_COLORS, can_draw, page_svg
from freerun.tools.plots.panels import Panel, PlotLine
from freerun.tools.plots.timeline_panels import STATE_COLORS

TIMELINE_PIXELS = 300
"""A timeline is this high, unless its rows would become lower or higher than these limits:"""
LEAST_ROW_PIXELS, MOST_ROW_PIXELS = 3, 22


def page(results: Results, folder: Path) -> str:
    """Return the report as HTML. `folder` holds the pictures of the timelines, which become part of the page."""
    options = results.options
    numbers = [number for number in options.numbers() if analysis.rows(results, number)]
    title = f"{options.env}: every way of collecting"
    parts = [_heading(results, title), _figures(results), _verdicts(results, numbers)]
    parts += [_scaling(results, numbers)] if len(numbers) > 1 and can_draw() else []
    # The largest number of workers comes first and is open; a click opens the others.
    for place, number in enumerate(reversed(numbers)):
        parts.append(_workers_section(results, number, folder, is_open=place == 0))
    parts.append(_about(results))
    # The style sheet and the pictures are part of the page, so that one file can be sent to somebody.
    style = files("freerun.tools.bench").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n'
        "</head>\n<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def _heading(results: Results, title: str) -> str:
    machine = results.machine
    facts = [
        f"{machine['cores']} cores ({machine['processor']})",
        f"{machine['memory_gigabytes']:g} GB",
        f"Python {machine['python']}",
        f"freerun {machine['freerun']}",
        results.date,
    ]
    return f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(" · ".join(facts))}</p>'


def _figures(results: Results) -> str:
    """Return boxes with the key figures of the highest rate."""
    table = analysis.all_rows(results)
    if not table:
        return "<section><p>Nothing was measured.</p></section>"
    best = table[0]
    # A headline must not claim a winner that the verdicts below do not.
    is_clear = len(table) == 1 or analysis.recommended(results) is not None
    noise = "" if is_clear else " (the highest rate, within the noise of others)"
    shown = [
        (f"{best.steps.middle:,.0f}", f"steps/s: {best.label}, {number_text(results, best.num_workers)}{noise}"),
        (percent(best.of_bare), "of the bare limit"),
        (analysis.clock(best.many_episodes_seconds), "for 100,000 episodes"),
    ]
    if best.speed_up is not None and best.label != SEQUENTIAL:
        shown.insert(1, (f"{text_report.speed_up(best)} ×", SEQUENTIAL))
    boxes = (f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in shown)
    return f'<div class="figures">{"".join(boxes)}</div>'


def _verdicts(results: Results, numbers: Sequence[int]) -> str:
    """Return what can be concluded, the command to train with, and how noisy the machine was."""
    lines = "".join(f"<li>{escape(analysis.verdict(results, number))}</li>" for number in numbers)
    found, (advice, command) = analysis.machine_noise(results), analysis.recommendation(results)
    parts = [f'<section><h2>What can be said</h2><ul class="verdicts">{lines}</ul>']
    parts.append(f'<p class="soft">{escape(advice)}</p>')
    if command is not None:
        parts.append(f"<pre><code>{escape(command)}</code></pre>")
    parts.append("</section>")
    if found is not None:
        kind = found.word.replace(" ", "-")
        parts.append(f'<section class="noise {kind}"><h2>How noisy it was</h2><p>{escape(str(found))}</p></section>')
    return "".join(parts)


# ---------------------------------------------------------------------------------------------- by workers


def _scaling(results: Results, numbers: Sequence[int]) -> str:
    """Return two charts by the number of workers: steps per second, and the share of the bare limit."""
    limits = [(number, limit.bare) for number in numbers if (limit := analysis.limits(results, number)) is not None]
    bare = PlotLine("bare limit", np.array([n for n, _ in limits]), np.array([rate.middle for _, rate in limits]))
    rates = Panel("steps per second", f"{counted(results)}s", "")
    shares = Panel("share of the bare limit", f"{counted(results)}s", "")
    table = {(row.label, number): row for number in numbers for row in analysis.rows(results, number)}
    for label in results.options.labels():
        if label == SEQUENTIAL:  # it has one worker, so there is no line to draw
            continue
        rows = {number: table[label, number] for number in numbers if (label, number) in table}
        if rows:
            low, middle, high = np.array([(r.steps.low, r.steps.middle, r.steps.high) for r in rows.values()]).T
            # rate / limit = share, so the limit that each share refers to is rate / share.
            limit = middle / np.array([row.of_bare for row in rows.values()])
            workers = np.array(list(rows))
            rates.lines.append(PlotLine(label, workers, middle, low, high))
            shares.lines.append(PlotLine(label, workers, middle / limit, low / limit, high / limit))
    keys = "".join(
        f'<span><i style="background: var(--line-{place % len(LINE_COLORS)})"></i>{escape(line.name)}</span>'
        for place, line in enumerate(rates.lines)
    )
    return (
        f"<section><h2>By the number of {counted(results)}s</h2>"
        f'<div class="keys">{keys}<span><i class="dash"></i>bare limit</span></div><div class="pair">'
        f"<div><h3>Steps per second</h3>{page_svg(rates, bare, 'log')}</div>"
        f"<div><h3>Share of the bare limit</h3>{page_svg(shares, None, 'percent')}</div></div></section>"
    )


# ---------------------------------------------------------------------------------------------- one number of workers


def _workers_section(results: Results, number: int, folder: Path, is_open: bool) -> str:
    rows, limit = analysis.rows(results, number), analysis.limits(results, number)
    assert limit is not None
    heading = number_text(results, number)
    inside = _bars(rows, limit) + _table(rows) + _timelines(results, rows, folder)
    if is_open:
        return f"<section><h2>{heading}</h2>{inside}</section>"
    return f"<section><details><summary><b>{heading}</b></summary>{inside}</details></section>"


def _bars(rows: Sequence[ReportRow], limit: Limits) -> str:
    """Return a bar for each mode as HTML, which stays readable on a phone, with the bare limit as a dashed line."""
    # 2 % more than the largest value, so that its whisker stays inside.
    largest = 1.02 * max(limit.bare.high, *(row.steps.high for row in rows))

    def position(rate: float) -> str:
        return f"{100 * rate / largest:.2f}%"

    parts = ['<p class="soft">Steps per second, and as a share of the bare limit</p><div class="bars">']
    for row in rows:
        kind = row.standing.replace(" ", "-")
        spread = row.steps.high - row.steps.low
        whisker = (
            f'<div class="whisker" style="left: {position(row.steps.low)}; width: {position(spread)}"></div>'
            if row.num_runs > 1  # one run has no spread
            else ""
        )
        track = (
            f'<div class="track"><div class="bar {kind}" style="width: {position(row.steps.middle)}"></div>{whisker}'
            f'<div class="limit" style="left: {position(limit.bare.middle)}"></div></div>'
        )
        value = f'<div class="value">{row.steps.middle:,.0f} <span class="soft">{percent(row.of_bare)}</span></div>'
        parts.append(f'<div class="name">{escape(row.label)}</div>{value}{track}')
    bare = f"bare limit, {text_report.range_text(limit.bare, len(limit.bare_runs))} steps/s"
    keys = (
        '<span><i style="background: var(--win)"></i>fastest</span>'
        '<span><i style="background: var(--as-fast)"></i>as fast, within the noise</span>'
        '<span><i style="background: var(--bar)"></i>slower</span>'
        f'<span><i class="dash"></i>{bare}</span>'
    )
    return "".join([*parts, f'</div><div class="keys">{keys}</div>'])


def _table(rows: Sequence[ReportRow]) -> str:
    """Return the table, and a sentence about steps that were dropped."""
    columns = (*text_report.COLUMNS, "workers busy", "learner busy", "steps an update", "runs")
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = []
    for row in rows:
        more = (percent(row.workers_busy), percent(row.learner_busy), f"{row.steps_per_update:,}", str(row.num_runs))
        filled = "".join(f"<td>{escape(cell)}</td>" for cell in (*text_report.cells(row), *more))
        lines.append(f'<tr class="{row.standing.replace(" ", "-")}">{filled}</tr>')
    dropped = [f"{row.label} dropped {row.dropped_steps:,.0f} steps" for row in rows if row.dropped_steps]
    note = f'<p class="soft">{escape("; ".join(dropped))}.</p>' if dropped else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>{note}'
    )


def _timelines(results: Results, rows: Sequence[ReportRow], folder: Path) -> str:
    """Return the pictures of the timelines, as far as there are some."""
    figures = []
    for row in rows:
        case = results.case(row.label, row.num_workers)
        path = folder / TIMELINES / case.picture if case is not None else None
        if path is None or not path.is_file():
            continue
        picture = path.read_bytes()
        # A PNG's header holds its height in these bytes, and the picture has one row of pixels for each track.
        num_tracks = int.from_bytes(picture[20:24], "big")
        height = num_tracks * max(LEAST_ROW_PIXELS, min(MOST_ROW_PIXELS, TIMELINE_PIXELS // num_tracks))
        figures.append(
            f"<figure><figcaption><h3>{escape(row.label)}</h3>"
            f'<span class="soft">workers {percent(row.workers_busy)} busy</span></figcaption>'
            f'<img alt="Who was busy when: {escape(row.label)}" style="height: {height}px" '
            f'src="data:image/png;base64,{base64.b64encode(picture).decode()}"></figure>'
        )
    if not figures:
        return ""
    keys = "".join(
        f'<span><i style="background: rgba({red}, {green}, {blue}, {opacity})"></i>{name.replace("-", " ")}</span>'
        for name, (red, green, blue, opacity) in STATE_COLORS.items()
    )
    seconds = min(PICTURE_SECONDS, results.options.seconds)
    return (
        '<h2 class="apart">Who waits for whom</h2>'
        f'<p class="soft">The last {seconds:g} s of a run, approximately. '
        "The learner has the top row, and each worker has a row below.</p>"
        f'<div class="keys">{keys}</div><div class="timelines">{"".join(figures)}</div>'
    )


def _about(results: Results) -> str:
    """Return what is missing and how everything was measured."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in text_report.method_notes(results))
    notes = analysis.left_out(results)
    if not can_draw():
        notes.append("the charts and the timelines: they need matplotlib (pip install 'freerun[plot]')")
    missing = (
        f"<h2>What is missing</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""
    )
    took = f"{results.outcome.capitalize()} after {results.seconds / 60:.1f} minutes."
    how = f'<h2>How it was measured</h2><ul class="soft">{lines}</ul><p class="soft">{took}</p>'
    return f"<section>{missing}{how}</section>"
