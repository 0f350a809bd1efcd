"""Draws panels: as a picture (matplotlib), as a page that can be zoomed (plotly), or as SVG inside another page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from freerun.core import UserError
from freerun.tools.plots.panels import Panel, PlotLine, PlotRows
from freerun.tools.plots.timeline_panels import STATE_COLORS

LINE_COLORS = (
    *("#2f6fde", "#d9822b", "#1a9a6c", "#b24cc4", "#c23b4e"),
    *("#8a7a12", "#1291a8", "#7a6a5d", "#5d6878"),
)
REFERENCE_COLOR, GRID_COLOR = "#1b2330", "#dfe3e9"
PAGE_COLORS = {
    REFERENCE_COLOR: "var(--limit)",
    GRID_COLOR: "var(--line)",
    **{color: f"var(--line-{place})" for place, color in enumerate(LINE_COLORS)},
}
"""The variables of a page's style sheet that take the place of these colours, so that a chart suits a dark page too."""
MOST_ROW_NAMES = 40
FEW_POINTS = 15
"""A line with fewer points shows each of them."""
MOST_LINES_WITH_LEGEND_INSIDE = 4


class LineStyle(NamedTuple):
    """How a line looks besides its colour, in the words of matplotlib and of plotly."""

    line: str
    marker: str
    plotly_line: str
    plotly_marker: str


LINE_STYLES = (
    LineStyle("-", "o", "solid", "circle"),
    LineStyle("--", "s", "dash", "square"),
    LineStyle(":", "^", "dot", "triangle-up"),
    LineStyle("-.", "D", "dashdot", "diamond"),
)


def _look(place: int) -> tuple[str, LineStyle]:
    """Return the colour and the style of a line. The style changes when the colours are used up."""
    return LINE_COLORS[place % len(LINE_COLORS)], LINE_STYLES[place // len(LINE_COLORS) % len(LINE_STYLES)]


def can_draw() -> bool:
    """Return whether matplotlib is installed, which pictures and SVG need."""
    return find_spec("matplotlib") is not None


def draw(panels: Sequence[Panel], output: Path) -> None:
    """Write the panels side by side to a file; its suffix chooses the format."""
    try:
        if output.suffix == ".html":
            _write_html(panels, output)
        elif output.suffix in (".png", ".svg", ".pdf"):
            _write_picture(panels, output)
        else:
            raise UserError(f"--output {output} must end in .png, .svg, .pdf or .html")
    except ModuleNotFoundError as missing:
        raise UserError(f"freerun plot needs {missing.name}: pip install 'freerun[plot]'") from None
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------- matplotlib


def _write_picture(panels: Sequence[Panel], output: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    tallest = max((len(panel.rows.names) if panel.rows else 0 for panel in panels), default=0)
    # In inches: 0.17 for a row and 1.6 for titles and legend, but no extreme formats.
    height = max(3.6, min(9.0, 1.6 + 0.17 * tallest))
    # Many lines leave no corner free: their legend then stands beside the plot, which is made wider for it.
    is_legend_outside = any(len(panel.lines) > MOST_LINES_WITH_LEGEND_INSIDE for panel in panels)
    width = 8.6 if is_legend_outside else 6.2
    figure = Figure(figsize=(width * len(panels), height), dpi=120, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.rows is not None:
            _draw_rows(axes, panel.rows)
            continue
        _draw_lines(axes, panel.lines)
        axes.grid(alpha=0.3)
        if panel.whole_x:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if is_legend_outside else {}
        axes.legend(frameon=False, fontsize="small", **legend_place)
        axes.spines[["top", "right"]].set_visible(False)
    if tallest:
        patches = [
            Patch(color=(red / 255, green / 255, blue / 255, opacity), label=name)
            for name, (red, green, blue, opacity) in STATE_COLORS.items()
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    with rc_context({"text.parse_math": False}):  # a `$` in the name of a run is not mathematics
        figure.savefig(output)


def _draw_lines(axes: Any, lines: Sequence[PlotLine]) -> None:
    for place, line in enumerate(lines):
        color, style = _look(place)
        marker = style.marker if len(line.x) < FEW_POINTS else None
        axes.plot(line.x, line.y, color=color, linestyle=style.line, label=line.name, marker=marker)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)


def _draw_rows(axes: Any, rows: PlotRows) -> None:
    # Without interpolation, because a mean of two states would look like a third.
    axes.imshow(rows.pixels, aspect="auto", interpolation="nearest", extent=(0, rows.seconds, len(rows.names), 0))
    if len(rows.names) <= MOST_ROW_NAMES:
        axes.set_yticks([place + 0.5 for place in range(len(rows.names))], rows.names, fontsize="small")
    axes.tick_params(left=False)
    for place in range(1, len(rows.names)):
        axes.axhline(place, color="white", linewidth=0.8)  # rows of the same state must stay apart
    axes.spines[:].set_visible(False)


# ---------------------------------------------------------------------------------------------- SVG inside a page


def page_svg(panel: Panel, reference: PlotLine | None, y_scale: Literal["log", "percent"]) -> str:
    """Draw lines by the number of workers as one `<svg>` element whose colours come from the page's style sheet.

    The reference is a dashed line. A point says its value when the mouse is over it. This needs matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axes = figure.subplots()
    _draw_lines(axes, panel.lines)
    if reference is not None:
        axes.plot(reference.x, reference.y, color=REFERENCE_COLOR, linestyle="--", marker="o")
    axes.set(xlabel=panel.x_label, xscale="log", yscale="log" if y_scale == "log" else "linear")
    everything = [*panel.lines, *([] if reference is None else [reference])]
    # The numbers of workers that were measured grow by factors; each gets a tick of its own.
    workers = sorted({int(x) for line in everything for x in line.x})
    axes.set_xticks(workers, list(map(str, workers)))
    axes.xaxis.set_minor_locator(NullLocator())
    if y_scale == "percent":
        # A mode may exceed the limit by a little, so the axis may have to end above 100 %.
        axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: _short(rate)))
    for line in everything:
        for x, y in zip(line.x, line.y, strict=True):
            value = f"{100 * y:.0f} %" if y_scale == "percent" else f"{y:,.0f}"
            # An invisible dot around the point carries the words; `_as_element` turns them into a tooltip.
            words = f"{TOOLTIP}{line.name}, {x} workers: {value}"
            axes.plot([x], [y], "o", color=REFERENCE_COLOR, markersize=12, alpha=0.0, gid=words)
    axes.grid(axis="y", color=GRID_COLOR)
    # The style sheet chooses the size of the text. This is its size on a phone, so that there is room for it.
    axes.tick_params(length=0, labelsize=13)
    axes.spines[:].set_visible(False)
    for artist in figure.findobj():
        artist.set_clip_on(False)  # a clip path would be one more id that two charts of a page might share
    # Text stays text, so that the style sheet can set its font; a fixed salt makes the same report give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title, "text.parse_math": False}):
        text = io.StringIO()
        # Without its metadata, the file names no address on the Internet.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _as_element(text.getvalue(), panel.title)


TOOLTIP = "tooltip: "


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate < 10_000 else f"{rate / 1000:,.0f}k"


def _as_element(document: str, title: str) -> str:
    """Turn matplotlib's SVG document into an element of an HTML page."""

    def group(found: re.Match[str]) -> str:
        name = found[2]  # matplotlib has escaped it already
        return f"<g><title>{name.removeprefix(TOOLTIP)}</title>" if name.startswith(TOOLTIP) else "<g>"

    view_box = re.search(r'viewBox="[^"]*"', document)
    assert view_box is not None
    # The first <defs> holds a style for all elements, which would apply to the whole page.
    inside = document[document.index("</defs>") + len("</defs>") : document.rindex("</svg>")]
    # Both charts of a page have groups of the same names, but an id may stand only once in a page.
    inside = re.sub(r"<g id=([\"'])(.*?)\1>", group, inside)
    for color, variable in PAGE_COLORS.items():
        inside = inside.replace(color, variable)
    return f'<svg class="chart" {view_box[0]} role="img" aria-label="{escape(title)}">{inside}</svg>'


# ---------------------------------------------------------------------------------------------- plotly


def _write_html(panels: Sequence[Panel], output: Path) -> None:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    figure = make_subplots(1, len(panels), subplot_titles=[panel.title for panel in panels])
    for column, panel in enumerate(panels, start=1):
        if panel.rows is not None:
            names, cell_seconds = panel.rows.names, panel.rows.seconds / panel.rows.pixels.shape[1]
            image = graph_objects.Image(z=panel.rows.pixels, colormodel="rgba256", dx=cell_seconds)
            figure.add_trace(image, 1, column)
            ticks = {"tickvals": list(range(len(names))), "ticktext": names} if len(names) <= MOST_ROW_NAMES else {}
            # Without this, plotly would keep the cells square and the rows would be invisibly thin.
            figure.update_yaxes(**ticks, scaleanchor=False, row=1, col=column)
        for place, line in enumerate(panel.lines):
            for trace in _line_traces(line, *_look(place)):
                figure.add_trace(trace, 1, column)
        figure.update_xaxes(title=panel.x_label, row=1, col=column)
        figure.update_yaxes(title=panel.y_label, row=1, col=column)
        if panel.whole_x:
            figure.update_xaxes(tickformat=",d", row=1, col=column)
    has_rows = any(panel.rows for panel in panels)
    if has_rows:
        for trace in _state_traces():
            figure.add_trace(trace, 1, 1)
    legend = {"orientation": "h", "y": -0.12, "x": 0.5, "xanchor": "center"} if has_rows else {}
    hovermode = "closest" if has_rows else "x unified"
    figure.update_layout(template="plotly_white", hovermode=hovermode, legend=legend, showlegend=True)
    figure.write_html(output, include_plotlyjs=True)  # with plotly's script inside, so that it needs no network


def _state_traces() -> list[Any]:
    """Return an entry of the legend for each state. An image has none, so each state gets a trace without a point."""
    from plotly.graph_objects import Scatter

    look: dict[str, Any] = {"symbol": "square", "size": 12, "line": {"width": 1, "color": "#bbbbbb"}}
    return [
        Scatter(
            x=[None], y=[None], mode="markers", marker={**look, "color": f"rgba{color}"}, name=name, hoverinfo="skip"
        )
        for name, color in STATE_COLORS.items()
    ]


def _line_traces(line: PlotLine, color: str, style: LineStyle) -> list[Any]:
    from plotly.graph_objects import Scatter

    look: dict[str, Any] = {
        "mode": "lines+markers" if len(line.x) < FEW_POINTS else "lines",
        "line": {"color": color, "dash": style.plotly_line},
        "marker": {"symbol": style.plotly_marker, "size": 8},
    }
    traces = [Scatter(x=line.x, y=line.y, name=line.name, legendgroup=line.name, **look)]
    if line.low is not None and line.high is not None:
        # Plotly draws a band as two invisible lines with the area between them filled.
        hidden = {"line": {"width": 0}, "mode": "lines", "showlegend": False, "hoverinfo": "skip"}
        fill = f"rgba({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))}, 0.2)"
        traces += [
            Scatter(x=line.x, y=line.low, legendgroup=line.name, **hidden),
            Scatter(x=line.x, y=line.high, legendgroup=line.name, fill="tonexty", fillcolor=fill, **hidden),
        ]
    return traces
