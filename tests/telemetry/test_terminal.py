"""What a person reads while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console

from freerun.core import Counts
from freerun.telemetry.budget import Budget
from freerun.telemetry.terminal import LiveDisplay, LogLines

RECORD = {
    "update": 5,
    "episodes": 12,
    "return_mean": -3.5,
    "length_mean": 80,
    "progress": 0.25,
    "steps_per_second": 100.0,
    "episodes_per_second": 1.0,
    "learner_waiting_share": 0.1,
    "learner_updating_share": 0.9,
    "workers_busy_share": 0.5,
    "dropped_steps": 7,
    "worker_restarts": 0,
}
MBPO = {
    "real_data": 5000.0,
    "model_data": 2000.0,
    "agent_updates": 1000.0,
    "agent_updates_per_second": 50.0,
    "dynamics_updates": 500.0,
    "buffer_percent": 40.0,
    "queue_percent": 60.0,
    "cpu_percent": 80.0,
    "eval_return": 123.0,
}


def lines(record: dict[str, float]) -> list[str]:
    file = io.StringIO()
    log = LogLines("title", Console(file=file, width=300))
    log.write(1000, record)
    log.close()
    return file.getvalue().splitlines()


def test_mbpo_has_the_line_that_its_users_know() -> None:
    *_, last = lines({**RECORD, **MBPO, "concurrent_stages": 1.0})
    assert last == "[AsyncMBPO] step=1000 real_data=5000 model_data=2000 agent_updates=1000 dynamics_updates=500"
    *_, last = lines({**RECORD, **MBPO, "concurrent_stages": 0.0})
    assert last.startswith("[MBPO] step=1000")


def test_others_have_one_line() -> None:
    title, line = lines(RECORD)
    assert title == "title"
    assert "return=-3.50" in line
    assert "eval" not in line


def test_the_display_shows_what_there_is() -> None:
    file = io.StringIO()
    display = LiveDisplay("title", Budget(4000, None), Counts, Console(file=file, width=120))
    display.write(1000, {**RECORD, **MBPO, "concurrent_stages": 1.0})
    display._live.console.print(display._render())
    display.close()
    text = file.getvalue()
    for shown in ("real data 5,000", "agent updates/s 50", "queue % 60", "buffer % 40", "CPU % 80", "eval return 123"):
        assert shown in text
    assert "GPU %" not in text
