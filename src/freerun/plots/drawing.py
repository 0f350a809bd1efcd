"""Panels as a picture (matplotlib) or as a page that can be zoomed (plotly)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freerun.core import UserError
from freerun.plots.panels import LINE_COLORS, STATE_COLORS, Line, Panel, Rows

MOST_ROW_NAMES = 40


def draw(panels: Sequence[Panel], output: Path) -> None:
    try:
        if output.suffix == ".html":
            _as_html(panels, output)
        elif output.suffix in (".png", ".svg", ".pdf"):
            _as_picture(panels, output)
        else:
            raise UserError(f"--output {output} must end in .png, .svg, .pdf or .html")
    except ModuleNotFoundError as missing:
        raise UserError(f"freerun plot needs {missing.name}: pip install 'freerun[plot]'") from None
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------- matplotlib


def _as_picture(panels: Sequence[Panel], output: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tallest = max((len(panel.rows.names) if panel.rows else 0 for panel in panels), default=0)
    height = max(3.6, min(9.0, 1.6 + 0.17 * tallest))
    figure = Figure(figsize=(6.2 * len(panels), height), dpi=120, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.rows is not None:
            _draw_rows(axes, panel.rows)
            continue
        for color, line in zip(_colors(len(panel.lines)), panel.lines, strict=True):
            axes.plot(line.x, line.y, color=color, label=line.name, marker="o" if len(line.x) < 15 else None)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    if tallest:
        patches = [Patch(color=f"#{bytes(color).hex()}", label=name) for name, color in STATE_COLORS.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize="small")
    with rc_context({"text.parse_math": False}):  # names are names, whatever is in them
        figure.savefig(output)


def _draw_rows(axes: Any, rows: Rows) -> None:
    axes.imshow(rows.colors, aspect="auto", interpolation="nearest", extent=(0, rows.seconds, len(rows.names), 0))
    if len(rows.names) <= MOST_ROW_NAMES:
        axes.set_yticks([place + 0.5 for place in range(len(rows.names))], rows.names, fontsize="small")
    axes.tick_params(left=False)
    for place in range(1, len(rows.names)):
        axes.axhline(place, color="white", linewidth=0.8)
    axes.spines[:].set_visible(False)


# ---------------------------------------------------------------------------------------------- plotly


def _as_html(panels: Sequence[Panel], output: Path) -> None:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    figure = make_subplots(1, len(panels), subplot_titles=[panel.title for panel in panels])
    for column, panel in enumerate(panels, start=1):
        if panel.rows is not None:
            image = graph_objects.Image(z=panel.rows.colors, dx=panel.rows.seconds / panel.rows.colors.shape[1])
            figure.add_trace(image, 1, column)
            ticks = {"tickvals": list(range(len(panel.rows.names))), "ticktext": panel.rows.names}
            figure.update_yaxes(**(ticks if len(panel.rows.names) <= MOST_ROW_NAMES else {}), row=1, col=column)
            figure.update_yaxes(scaleanchor=False, row=1, col=column)
        for color, line in zip(_colors(len(panel.lines)), panel.lines, strict=True):
            for trace in _traces(line, color):
                figure.add_trace(trace, 1, column)
        figure.update_xaxes(title=panel.x_label, row=1, col=column)
        figure.update_yaxes(title=panel.y_label, row=1, col=column)
    figure.update_layout(template="plotly_white", hovermode="x unified")
    figure.write_html(output, include_plotlyjs=True)


def _traces(line: Line, color: str) -> list[Any]:
    from plotly.graph_objects import Scatter

    traces = [Scatter(x=line.x, y=line.y, name=line.name, line={"color": color}, legendgroup=line.name)]
    if line.low is not None and line.high is not None:
        hidden = {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip", "legendgroup": line.name}
        fill = f"rgba({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))}, 0.2)"
        traces += [
            Scatter(x=line.x, y=line.low, **hidden),
            Scatter(x=line.x, y=line.high, fill="tonexty", fillcolor=fill, **hidden),
        ]
    return traces


def _colors(number: int) -> list[str]:
    return [LINE_COLORS[place % len(LINE_COLORS)] for place in range(number)]
