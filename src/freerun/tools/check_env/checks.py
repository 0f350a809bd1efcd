"""Runs `freerun check-env`: it examines an environment topic by topic and prints what was found."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from freerun.adapters.gymnasium_envs import EnvName
from freerun.core import EnvFailure, UserError
from freerun.tools.check_env.check_topics import STEP_TOPICS, TOPICS, CheckedEnv, Topic
from freerun.tools.check_env.remedies import Level


@dataclass(frozen=True)
class Finding:
    """What one topic found, and what to do about it."""

    topic: str
    level: Level
    found: str
    advice: str = ""

    @property
    def good(self) -> bool:
        return self.level != "problem"


def check(env: EnvName, env_args: Mapping[str, Any], num_episodes: int = 3, wrap: str | None = None) -> list[Finding]:
    """Examine an environment, inside the wrapper of this name if there is one.

    An environment that cannot be built raises, as it does in training.
    """
    if num_episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {num_episodes}")
    states = random.getstate(), np.random.get_state()  # the check seeds the global generators
    try:
        checked = CheckedEnv(env, env_args, num_episodes, wrap)
        has_steps = any(episode.num_steps for episode in checked.episodes)
        topics = {**TOPICS, **(STEP_TOPICS if has_steps else {}), "closing": CheckedEnv.close}
        findings = [finding for name, topic in topics.items() for finding in _examine(name, topic, checked)]
        # Without a single step, "no NaN was found" would say nothing.
        return [finding for finding in findings if has_steps or finding.level != "ok"]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _examine(name: str, topic: Topic, checked: CheckedEnv) -> list[Finding]:
    """Return what a topic found. Its "ok" is left out where it found something else."""
    try:
        findings = [Finding(name, *verdict) for verdict in topic(checked)]
    except (EnvFailure, UserError) as failure:
        return [Finding(name, "problem", str(failure), "mend what the last line says")]
    return [finding for finding in findings if finding.level != "ok"] or findings


MARKS: dict[Level, tuple[str, str]] = {"ok": ("✔", "green"), "warning": ("!", "yellow"), "problem": ("✘", "red")}


def print_report(env: EnvName, findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding, its advice below it, and a summary."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        mark, color = MARKS[finding.level]
        table.add_row(Text(mark, color), Text(finding.topic, "bold", no_wrap=True), Text(finding.found))
        if finding.advice:
            table.add_row("", "", Text(f"→ {finding.advice}", "dim" if finding.level == "ok" else color))
    console.print(Text(str(env), "bold"))
    console.print(table)
    num_problems, num_warnings = (
        sum(finding.level == level for finding in findings) for level in ("problem", "warning")
    )
    summary = f"{num_problems} to mend (✘), {num_warnings} to look at (!)."
    console.print(summary if num_problems or num_warnings else "All good.")
