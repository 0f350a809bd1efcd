"""`report.html`: one file without scripts that needs no network, for light and dark screens, phones and paper."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from freerun.benching import analysis, charts, text
from freerun.benching.analysis import Limits, Row, counted, percent
from freerun.benching.job import PICTURE_SECONDS
from freerun.benching.noise import Range
from freerun.benching.results import SEQUENTIAL, Results
from freerun.benching.running import TIMELINES
from freerun.benching.timelines import COLORS

ROW_PIXELS = (3, 22)
"""A worker's row in a timeline is at least and at most so high."""


def page(results: Results, folder: Path) -> str:
    options = results.options
    numbers = [number for number in options.numbers() if analysis.rows(results, number)]
    title = f"{options.env}: every way of collecting"
    parts = [_head(results, title), _figures(results), _verdicts(results, numbers)]
    parts += [_scaling(results, numbers)] if len(numbers) > 1 else []
    for place, number in enumerate(reversed(numbers)):
        parts.append(_section(results, number, folder, is_open=place == 0))
    parts.append(_about(results))
    style = files("freerun.benching").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n'
        "</head>\n<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def _head(results: Results, title: str) -> str:
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
    best = analysis.best_row(results)
    if best is None:
        return "<section><p>Nothing was measured.</p></section>"
    shown = [
        (f"{best.steps.middle:,.0f}", f"steps/s: {best.label}, {counted(best.num_workers)}"),
        (f"{percent(best.of_bare)}", "of the bare limit"),
        (analysis.clock(best.many_episodes_seconds), "for 100,000 episodes"),
    ]
    if best.speed_up is not None and best.label != SEQUENTIAL:
        shown.insert(1, (f"{text.speed_up(best)} ×", "sequential"))
    boxes = (f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in shown)
    return f'<div class="figures">{"".join(boxes)}</div>'


def _verdicts(results: Results, numbers: Sequence[int]) -> str:
    lines = "".join(f"<li>{escape(analysis.verdict(results, number))}</li>" for number in numbers)
    found, best = analysis.machine_noise(results), analysis.best_row(results)
    parts = [f'<section><h2>What can be said</h2><ul class="verdicts">{lines}</ul>']
    if best is not None:
        command = analysis.command(results, best)
        parts.append(f'<p class="soft">To train the fastest way:</p><pre><code>{escape(command)}</code></pre>')
    parts.append("</section>")
    if found is not None:
        kind = found.word.replace(" ", "-")
        parts.append(f'<section class="noise {kind}"><h2>How noisy it was</h2><p>{escape(str(found))}</p></section>')
    return "".join(parts)


# ---------------------------------------------------------------------------------------------- by workers


def _scaling(results: Results, numbers: Sequence[int]) -> str:
    labels = [label for label in results.options.labels() if label != SEQUENTIAL]
    of_rate, of_share = [], []
    for place, label in enumerate(labels):
        found = [(number, row) for number in numbers for row in analysis.rows(results, number) if row.label == label]
        if found:
            of_rate.append(charts.Line(label, charts.color(place), tuple((n, row.steps) for n, row in found)))
            of_share.append(charts.Line(label, charts.color(place), tuple((n, _share(row)) for n, row in found)))
    limits = tuple((n, limit.bare) for n in numbers if (limit := analysis.limits(results, n)) is not None)
    of_rate.append(charts.Line("bare limit", "--limit", limits, dashed=True))
    keys = "".join(
        f'<span><i style="background: var({line.color})"></i>{escape(line.name)}</span>' for line in of_share
    )
    rates, shares = (
        charts.chart(of_rate, numbers, "steps per second", is_share=False),
        charts.chart(of_share, numbers, "share of the bare limit", is_share=True),
    )
    return (
        "<section><h2>By the number of workers</h2>"
        f'<div class="keys">{keys}<span><i class="dash"></i>bare limit</span></div><div class="pair">'
        f"<div><h3>Steps per second</h3>{rates}</div>"
        f"<div><h3>Share of the bare limit</h3>{shares}</div></div></section>"
    )


def _share(row: Row) -> Range:
    limit = row.steps.middle / row.of_bare
    return Range(row.steps.low / limit, row.of_bare, row.steps.high / limit)


# ---------------------------------------------------------------------------------------------- one number of workers


def _section(results: Results, number: int, folder: Path, is_open: bool) -> str:
    rows, limit = analysis.rows(results, number), analysis.limits(results, number)
    assert limit is not None
    heading = f"{counted(number)[0].upper()}{counted(number)[1:]}"
    inside = _bars(rows, limit) + _table(rows) + _timelines(results, rows, folder)
    if is_open:
        return f"<section><h2>{heading}</h2>{inside}</section>"
    return f"<section><details><summary><b>{heading}</b></summary>{inside}</details></section>"


def _bars(rows: Sequence[Row], limit: Limits) -> str:
    whole = 1.02 * max(limit.bare.high, *(row.steps.high for row in rows))

    def at(rate: float) -> str:
        return f"{100 * rate / whole:.2f}%"

    parts = ['<p class="soft">Steps per second, and as a share of the bare limit</p><div class="bars">']
    for row in rows:
        kind = row.standing.replace(" ", "-")
        spread = row.steps.high - row.steps.low
        whisker = (
            f'<div class="whisker" style="left: {at(row.steps.low)}; width: {at(spread)}"></div>'
            if row.num_runs > 1
            else ""
        )
        track = (
            f'<div class="track"><div class="bar {kind}" style="width: {at(row.steps.middle)}"></div>{whisker}'
            f'<div class="limit" style="left: {at(limit.bare.middle)}"></div></div>'
        )
        value = f'<div class="value">{row.steps.middle:,.0f} <span class="soft">{percent(row.of_bare)}</span></div>'
        parts.append(f'<div class="name">{escape(row.label)}</div>{value}{track}')
    bare = f"bare limit, {text.ranged(limit.bare, len(limit.bare_runs))} steps/s"
    keys = (
        '<span><i style="background: var(--win)"></i>fastest</span>'
        '<span><i style="background: var(--as-fast)"></i>no difference to it can be called</span>'
        '<span><i style="background: var(--bar)"></i>slower</span>'
        f'<span><i class="dash"></i>{bare}</span>'
    )
    return "".join([*parts, f'</div><div class="keys">{keys}</div>'])


def _table(rows: Sequence[Row]) -> str:
    columns = (*text.COLUMNS, "workers busy", "learner busy", "steps an update", "runs")
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = []
    for row in rows:
        more = [
            f"{percent(row.workers_busy)}",
            f"{percent(row.learner_busy)}",
            f"{row.steps_per_update:,}",
            f"{row.num_runs}",
        ]
        filled = "".join(f"<td>{escape(cell)}</td>" for cell in (*text.cells(row), *more))
        lines.append(f'<tr class="{row.standing.replace(" ", "-")}">{filled}</tr>')
    dropped = [f"{row.label} dropped {row.dropped_steps:,.0f} steps" for row in rows if row.dropped_steps]
    note = f'<p class="soft">{escape("; ".join(dropped))}.</p>' if dropped else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>{note}'
    )


def _timelines(results: Results, rows: Sequence[Row], folder: Path) -> str:
    figures = []
    for row in rows:
        case = results.case(row.label, row.num_workers)
        path = folder / TIMELINES / case.picture if case is not None else None
        if path is None or not path.is_file():
            continue
        picture = path.read_bytes()
        tracks = int.from_bytes(picture[20:24], "big")  # the height, in the PNG's header
        height = tracks * max(ROW_PIXELS[0], min(ROW_PIXELS[1], 300 // tracks))
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
        for name, (red, green, blue, opacity) in COLORS.items()
    )
    seconds = min(PICTURE_SECONDS, results.options.seconds)
    return (
        '<h2 class="apart">Who waits for whom</h2>'
        f'<p class="soft">About the last {seconds:g} s of a run, measured; '
        "the learner on top, a row for each worker below.</p>"
        f'<div class="keys">{keys}</div><div class="timelines">{"".join(figures)}</div>'
    )


def _about(results: Results) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in text.how(results))
    notes = analysis.left_out(results)
    missing = (
        f"<h2>What is missing</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""
    )
    took = f"{results.outcome.capitalize()} after {results.seconds / 60:.1f} minutes."
    how = f'<h2>How it was measured</h2><ul class="soft">{lines}</ul><p class="soft">{took}</p>'
    return f"<section>{missing}{how}</section>"
