"""What a person sees while a run goes on: a live display, or plain log lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freerun.core import Counts
from freerun.telemetry.figures import FIGURES, RecentRecords

LOG_EVERY_SECONDS = 2.0
BAR_WIDTH = 24
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
"""Rows of the live display that only some algorithms, modes and machines have something to say in."""


class _Budget(Protocol):
    @property
    def total_steps(self) -> int | None: ...
    @property
    def total_episodes(self) -> int | None: ...


class LiveDisplay:
    """Redraws itself four times a second, so that episodes are seen to arrive also within a long round."""

    def __init__(self, title: str, budget: _Budget, counts: Callable[[], Counts], console: Console):
        self._title = title
        self._budget = budget
        self._counts = counts
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._started = time.monotonic()
        self._recent = RecentRecords()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics = step, dict(metrics)
        self._recent.write(step, metrics)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        metrics = self._metrics
        total_steps, total_episodes = self._budget.total_steps, self._budget.total_episodes
        # Steps arrive before they are learned from; between updates the bar follows them.
        steps = max(self._step, self._counts().steps_delivered)
        progress = metrics.get("progress", 0.0)
        if total_steps and not total_episodes:
            progress = min(1.0, max(progress, steps / total_steps))
        elapsed = time.monotonic() - self._started
        remaining = elapsed * (1 - progress) / progress if progress > 0.01 else None
        goal = f"{total_steps:,} steps" if total_steps else f"{total_episodes:,} episodes"
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=1.0, completed=progress, width=40),
            f"{progress:4.0%} of {goal}",
            Text(f"{_clock(elapsed)} elapsed, {_clock(remaining)} to go", style="dim"),
        )
        if not metrics:
            waiting = Text(f"collecting the first round … {steps:,} steps", style="dim")
            return Group(Text(self._title, style="bold"), head, waiting)
        figures = Table.grid(padding=(0, 3))
        figures.add_row(
            _figure("return", f"{metrics['return_mean']:.1f}"),
            _figure("length", f"{metrics['length_mean']:.0f}"),
            _figure("steps", f"{steps:,}"),
            _figure("episodes", f"{metrics['episodes']:,.0f}"),
            _figure("updates", f"{metrics['update']:,.0f}"),
        )
        figures.add_row(
            _figure("steps/s", f"{metrics['steps_per_second']:,.0f}"),
            _figure("episodes/s", f"{metrics['episodes_per_second']:,.1f}"),
            _figure("lag", f"{metrics.get('lag_mean', 0):.2f}"),
            _figure("dropped", f"{metrics['dropped_steps']:,.0f}"),
            _figure("restarts", f"{metrics['worker_restarts']:,.0f}"),
        )
        for names in OPTIONAL_FIGURES:
            if known := {name: label for name, label in names.items() if name in metrics}:
                figures.add_row(
                    *(_figure(label, f"{metrics[name]:,.0f}", _style(name, metrics)) for name, label in known.items())
                )
        waits = Table.grid(padding=(0, 1))
        busy, waiting_share = metrics["workers_busy_share"], metrics["learner_waiting_share"]
        waits.add_row("workers", _bar(busy), f"{busy:4.0%} busy{_what_workers_wait_for(metrics)}")
        updating = metrics["learner_updating_share"]
        waits.add_row("learner", _bar(updating), f"{updating:4.0%} updating, {waiting_share:.0%} waiting for workers")
        advice = self._recent.advice()
        told = [Text(advice, style="yellow")] if advice else []
        return Group(Text(self._title, style="bold"), head, figures, waits, *told)


class LogLines:
    """A line every two seconds."""

    def __init__(self, title: str, console: Console):
        self._console = console
        self._last = float("-inf")
        self._unwritten: tuple[int, Mapping[str, float]] | None = None
        self._print(title)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._unwritten = (step, metrics)
        if time.monotonic() - self._last >= LOG_EVERY_SECONDS:
            self._log()

    def close(self) -> None:
        self._log()

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
            "return": f"{metrics['return_mean']:.2f}",
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
        self._print(f"{metrics['progress']:4.0%}  " + " ".join(f"{name}={value}" for name, value in shown.items()))
        if "dynamics_updates" in metrics:
            counts = {name: metrics[name] for name in ("real_data", "model_data", "agent_updates", "dynamics_updates")}
            label = "AsyncMBPO" if metrics["concurrent_stages"] else "MBPO"
            counted = " ".join(f"{name}={value:.0f}" for name, value in {"step": step, **counts}.items())
            self._print(f"[{label}] {counted}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def _figure(name: str, value: str, style: str = "bold cyan") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _style(name: str, metrics: Mapping[str, float]) -> str:
    """Green within its target, yellow outside."""
    figure = FIGURES.get(name)
    if figure is None or not figure.target:
        return "bold cyan"
    return "bold green" if figure.is_good(metrics[name]) else "bold yellow"


def _what_workers_wait_for(metrics: Mapping[str, float]) -> str:
    waits = {what: metrics.get(f"workers_waiting_for_{what}_share", 0.0) for what in ("slot", "weights", "others")}
    return "".join(f", {share:.0%} waiting for {what}" for what, share in waits.items() if share >= 0.005)


def _bar(share: float) -> Text:
    full = round(min(1.0, share) * BAR_WIDTH)
    return Text.assemble(("█" * full, "green"), ("░" * (BAR_WIDTH - full), "dim"))


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
