"""Shows a run while it goes on: a live display in a terminal, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freerun.core import Counts
from freerun.telemetry.advice import FIGURES
from freerun.telemetry.budget import Budget
from freerun.telemetry.plain_text import format_or_dash, print_plain
from freerun.telemetry.waiting import SILENT_SECONDS, WaitingStatus

LOG_EVERY_SECONDS = 2.0
MIN_BAR_WIDTH, BAR_WIDTH = 8, 24
COLUMN_GAP = 3
OPTIONAL_FIGURES = (
    {
        "real_data": "real data",
        "model_data": "model data",
        "agent_updates": "agent updates",
        "agent_updates_per_second": "agent updates/s",
        "dynamics_updates": "dynamics updates",
    },
    {
        "queue_percent": "queue %",
        "buffer_percent": "buffer %",
        "cpu_percent": "CPU %",
        "gpu_percent": "GPU %",
        "eval_return": "eval return",
    },
)
"""Two rows of the live display, with metrics that only some algorithms, modes and machines have."""


OwnLine = Callable[[int, Mapping[str, float]], str]
"""From the steps so far and the metrics of an update to a line that only this algorithm has."""


class LiveDisplay:
    """A sink that redraws the figures of a run four times a second, so that steps are seen to arrive between updates.

    As everywhere else, `steps` are those that were learned from. Steps that wait for the next update are shown beside
    them.
    """

    def __init__(
        self,
        title: str,
        budget: Budget,
        waiting: WaitingStatus,
        advice: Callable[[], str | None],
        counts: Callable[[], Counts],
        console: Console,
        own_line: OwnLine | None = None,
    ):
        self._title = title
        self._own_line = own_line
        self._budget = budget
        self._waiting = waiting
        self._counts = counts
        self._console = console
        self._step = counts().steps_delivered  # more than 0 in a run that was resumed
        self._metrics: Mapping[str, float] = {}
        self._began_at = time.monotonic()
        self._is_closed = False
        self._advice = advice
        self._live = Live(get_renderable=self.__rich__, console=console, refresh_per_second=4)
        self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # rich redraws on a thread of its own. Both attributes are replaced, never changed, so no lock is needed: at
        # worst one frame shows the new step with the old metrics.
        self._step, self._metrics = step, dict(metrics)
        self._waiting.note_update()

    def close(self) -> None:
        self._is_closed = True
        self._live.stop()

    def __rich__(self) -> RenderableType:
        """Draw the picture of this moment. rich calls this method of whatever it prints."""
        title = Text(self._title, style="bold")
        if not self._metrics:  # before the first update there is nothing else to show
            return Group(title, self._progress(), *self._status(at_once=True))
        advice = self._advice()
        advised = [Text(advice, style="yellow")] if advice else []
        own = [Text(self._own_line(self._step, self._metrics), style="dim")] if self._own_line is not None else []
        return Group(title, self._progress(), self._figures(), *self._bars(), *own, *advised, *self._status())

    def _progress(self) -> RenderableType:
        total_steps, total_episodes = self._budget.total_steps, self._budget.total_episodes
        progress = self._metrics.get("progress", 0.0)
        # With a limit on steps alone, progress follows the steps that are shown; otherwise it is as of the last update.
        if total_steps and not total_episodes:
            progress = min(1.0, max(progress, self._step / total_steps))
        elapsed = time.monotonic() - self._began_at
        # Time to go: elapsed / progress is the whole. Under one percent that would be a wild guess.
        remaining = elapsed * (1 - progress) / progress if progress > 0.01 else None
        goal = f"{total_steps:,} steps" if total_steps else f"{total_episodes:,} episodes"
        done = f"{progress:4.0%} of {goal}  "
        clock = f"{_clock(elapsed)} elapsed, {_clock(remaining)} to go"
        row = Table.grid(padding=(0, 2))
        # The bar takes what the texts leave, so that the row fits a narrow terminal.
        width = max(MIN_BAR_WIDTH, min(40, self._console.width - len(done) - len(clock) - 2))
        row.add_row(ProgressBar(total=1.0, completed=progress, width=width), Text.assemble(done, (clock, "dim")))
        return row

    def _figures(self) -> RenderableType:
        metrics = self._metrics
        # After the end nothing will be learned from what still waits, so it is not shown.
        waiting = 0 if self._is_closed else max(0, self._counts().steps_delivered - self._step)
        rows = [
            [
                _figure("return", format_or_dash(metrics["return_mean"], ".1f")),
                _figure("length", format_or_dash(metrics["length_mean"], ".0f")),
                _figure("steps", f"{self._step:,}" + (f" (+{waiting:,} waiting)" if waiting else "")),
                _figure("episodes", f"{metrics['episodes']:,.0f}"),
                _figure("updates", f"{metrics['update']:,.0f}"),
            ],
            [
                _figure("steps/s", f"{metrics['steps_per_second']:,.0f}"),
                _figure("episodes/s", f"{metrics['episodes_per_second']:,.1f}"),
                _figure("lag", f"{metrics.get('lag_mean', 0):.2f}"),
                _figure("dropped", f"{metrics['dropped_steps']:,.0f}"),
                _figure("restarts", f"{metrics['worker_restarts']:,.0f}"),
            ],
        ]
        rows += [
            [
                _figure(label, f"{metrics[name]:,.0f}", _style(name, metrics))
                for name, label in names.items()
                if name in metrics
            ]
            for names in OPTIONAL_FIGURES
        ]
        return _grid(rows, self._console.width)

    def _bars(self) -> list[RenderableType]:
        metrics = self._metrics
        busy, updating = metrics["workers_busy_share"], metrics["learner_updating_share"]
        rows = {
            "workers": (busy, f"{busy:4.0%} busy{_what_workers_wait_for(metrics)}"),
            "learner": (updating, f"{updating:4.0%} updating, waits {metrics['learner_waiting_share']:.0%} data"),
        }
        words_width = max(len(words) for _, words in rows.values())
        width = max(MIN_BAR_WIDTH, min(BAR_WIDTH, self._console.width - len("workers  ") - words_width - 1))
        return [Text.assemble(f"{name} ", *_bar(share, width), f" {words}") for name, (share, words) in rows.items()]

    def _status(self, at_once: bool = False) -> list[RenderableType]:
        """Say what the run is waiting for, if there has been no update for some time."""
        if self._is_closed:
            return []
        if self._waiting.seconds >= SILENT_SECONDS:
            return [Text(self._waiting.sentence(), style="yellow")]
        return [Text(self._waiting.text(), style="dim")] if at_once else []


class LogLines:
    """A sink that prints a line every two seconds, and one at the end."""

    def __init__(self, title: str, console: Console, own_line: OwnLine | None = None):
        self._console = console
        self._own_line = own_line
        self._last = float("-inf")  # so that the first record is printed at once
        self._unwritten: tuple[int, Mapping[str, float]] | None = None
        print_plain(console, title)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._unwritten = (step, metrics)
        if time.monotonic() - self._last >= LOG_EVERY_SECONDS:
            self._log()

    def close(self) -> None:
        self._log()  # the last record, which may have come less than two seconds after the one before

    def _log(self) -> None:
        if self._unwritten is None:
            return
        step, metrics = self._unwritten
        self._unwritten = None
        self._last = time.monotonic()
        shown = {
            "step": f"{step}",
            "episodes": f"{metrics['episodes']:.0f}",
            "update": f"{metrics['update']:.0f}",
            "return": format_or_dash(metrics["return_mean"], ".2f"),
            "steps/s": f"{metrics['steps_per_second']:.0f}",
            "episodes/s": f"{metrics['episodes_per_second']:.1f}",
            "lag": f"{metrics.get('lag_mean', 0):.2f}",
            "workers_busy": f"{metrics['workers_busy_share']:.0%}",
            "learner_updating": f"{metrics['learner_updating_share']:.0%}",
        }
        if "queue_percent" in metrics:
            shown |= {"queue": f"{metrics['queue_percent']:.0f}%", "dropped": f"{metrics['dropped_steps']:.0f}"}
        if "eval_return" in metrics:
            shown["eval"] = f"{metrics['eval_return']:.2f}"
        print_plain(
            self._console,
            f"{metrics['progress']:4.0%}  " + " ".join(f"{name}={value}" for name, value in shown.items()),
        )
        if self._own_line is not None:
            print_plain(self._console, self._own_line(step, metrics))


def _figure(name: str, value: str, style: str = "bold cyan") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _style(name: str, metrics: Mapping[str, float]) -> str:
    """Choose green within the target range, and yellow outside it."""
    figure = FIGURES.get(name)
    if figure is None or not figure.target:
        return "bold cyan"
    return "bold green" if figure.is_good(metrics[name]) else "bold yellow"


def _grid(rows: Sequence[Sequence[Text]], width: int) -> Table:
    """Make a table with as many columns as the width allows, so that no figure is cut or wrapped."""
    # Try the widest layout first; one column always has to do.
    for num_columns in range(max(map(len, rows)), 0, -1):
        lines = [row[start : start + num_columns] for row in rows for start in range(0, len(row), num_columns)]
        widths = [max(line[column].cell_len for line in lines if len(line) > column) for column in range(num_columns)]
        if sum(widths) + COLUMN_GAP * (num_columns - 1) <= width:
            break
    table = Table.grid(padding=(0, COLUMN_GAP))
    for _ in range(num_columns):
        table.add_column(no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _what_workers_wait_for(metrics: Mapping[str, float]) -> str:
    shares = {what: metrics.get(f"workers_waiting_for_{what}_share", 0.0) for what in ("slot", "weights", "others")}
    # Smaller shares would be shown as 0 %.
    waits = [f"{share:.0%} {what}" for what, share in shares.items() if share >= 0.005]
    return f", waits {' '.join(waits)}" if waits else ""


def _bar(share: float, width: int) -> tuple[tuple[str, str], tuple[str, str]]:
    full = round(min(1.0, share) * width)
    return ("█" * full, "green"), ("░" * (width - full), "dim")


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
