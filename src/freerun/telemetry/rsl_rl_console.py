"""Prints the console block that users of RSL-RL know, after every update."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping

from rich.console import Console

from freerun.telemetry.metric_tags import OWN_PREFIX, rsl_rl_tags
from freerun.telemetry.plain_text import print_plain

WIDTH, LABEL_WIDTH = 80, 40
LOSS = "Loss/"
FAMILIES = (LOSS, "Perf/", "Train/", "Policy/", OWN_PREFIX, "lag_share/")
"""Tags with these prefixes are freerun's. All other tags were logged by the simulator itself."""


class RslRlBlocks:
    """A sink that prints one block per update."""

    def __init__(self, title: str, console: Console):
        self._console = console
        print_plain(console, title)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        print_plain(self._console, block(step, metrics))

    def close(self) -> None:
        """This sink holds nothing open."""


def block(step: int, metrics: Mapping[str, float]) -> str:
    """Return the text for one iteration."""
    tags = rsl_rl_tags(metrics)
    iteration, progress = int(metrics["update"]), metrics["progress"]
    # The total number of iterations is an estimate: a run is limited by steps or episodes, not by updates.
    total = max(iteration, round(iteration / progress)) if progress > 0 else iteration
    elapsed = metrics["wall_seconds"]
    rows = {
        "Total steps": f"{step}",
        "Steps per second": f"{tags['Perf/total_fps']:.0f}",
        "Collection time": f"{tags['Perf/collection_time']:.3f}s",
        "Learning time": f"{tags['Perf/learning_time']:.3f}s",
    }
    losses = {tag.removeprefix(LOSS): value for tag, value in tags.items() if tag.startswith(LOSS)}
    losses.pop("learning_rate", None)  # RSL-RL files it under Loss/, but prints only losses
    rows |= {f"Mean {name} loss": f"{value:.4f}" for name, value in losses.items()}
    if math.isfinite(tags["Train/mean_reward"]):  # NaN before the first episode has ended
        rows["Mean reward"] = f"{tags['Train/mean_reward']:.2f}"
        rows["Mean episode length"] = f"{tags['Train/mean_episode_length']:.2f}"
    if "Policy/mean_std" in tags:
        rows["Mean action std"] = f"{tags['Policy/mean_std']:.2f}"
    rows |= {tag: f"{value:.4f}" for tag, value in tags.items() if not tag.startswith(FAMILIES)}
    footer = {
        "Iteration time": f"{metrics['interval_seconds']:.2f}s",
        "Time elapsed": _clock(elapsed),
        "ETA": _clock(elapsed * (1 - progress) / progress) if progress > 0 else "unknown",
    }
    title = f"Learning iteration {iteration}/{total}"
    return "\n".join(["#" * WIDTH, title.center(WIDTH).rstrip(), "", *_lines(rows), "-" * WIDTH, *_lines(footer), ""])


def _lines(rows: Mapping[str, str]) -> list[str]:
    return [f"{label + ':':>{LABEL_WIDTH}} {value}" for label, value in rows.items()]


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))
