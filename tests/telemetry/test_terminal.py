"""The displays show a run while it goes on."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from freerun.algorithms.mbpo import mbpo
from freerun.core import AlgorithmTraits, Counts
from freerun.telemetry.budget import Budget
from freerun.telemetry.terminal import LiveDisplay, LogLines
from freerun.telemetry.time_shares import LearnerActivity
from freerun.telemetry.waiting import WaitingStatus

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


def lines(record: dict[str, float], traits: AlgorithmTraits) -> list[str]:
    file = io.StringIO()
    log = LogLines("title", Console(file=file, width=300), traits.console_line)
    log.write(1000, record)
    log.close()
    return file.getvalue().splitlines()


def test_mbpo_has_the_line_that_its_users_know() -> None:
    *_, last = lines({**RECORD, **MBPO, "concurrent_stages": 1.0}, mbpo.MBPO.traits)
    assert last == "[AsyncMBPO] step=1000 real_data=5000 model_data=2000 agent_updates=1000 dynamics_updates=500"
    *_, last = lines({**RECORD, **MBPO, "concurrent_stages": 0.0}, mbpo.MBPO.traits)
    assert last.startswith("[MBPO] step=1000")


def test_others_have_one_line() -> None:
    title, line = lines(RECORD, AlgorithmTraits())
    assert title == "title"
    assert "return=-3.50" in line
    assert "eval" not in line


def shown(record: dict[str, float], width: int, counts: Counts | None = None, is_closed: bool = False) -> list[str]:
    """What the live display draws in a terminal of this width, with the line of MBPO where the record is one of its."""
    own_line = mbpo.MBPO.traits.console_line if "dynamics_updates" in record else None
    console = Console(file=io.StringIO(), width=width)
    counted = counts or Counts()
    waiting = WaitingStatus(lambda: LearnerActivity("updating"), lambda: counted, lambda demand: None)
    display = LiveDisplay("title", Budget(4000, None), waiting, lambda: None, lambda: counted, console, own_line)
    display.write(1000, record)
    if is_closed:
        display.close()
    picture = Console(file=io.StringIO(), width=width)
    picture.print(display)
    display.close()
    return picture.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_the_display_shows_what_there_is() -> None:
    text = "\n".join(shown({**RECORD, **MBPO, "concurrent_stages": 1.0}, 120))
    for part in ("real data 5,000", "agent updates/s 50", "queue % 60", "buffer % 40", "CPU % 80", "eval return 123"):
        assert part in text
    assert "GPU %" not in text
    assert "[AsyncMBPO] step=1000 real_data=5000 model_data=2000 agent_updates=1000 dynamics_updates=500" in text


def test_nothing_is_cut_or_broken_in_a_narrow_terminal() -> None:
    long = dict.fromkeys((*MBPO, "episodes", "update", "steps_per_second", "dropped_steps"), 123456789.0)
    waits = {f"workers_waiting_for_{what}_share": 0.33 for what in ("slot", "weights", "others")}
    lines = shown({**RECORD, **MBPO, **long, **waits, "concurrent_stages": 1.0, "gpu_percent": 50.0}, 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in ("agent updates/s 123,456,789", "dynamics updates 123,456,789", "dropped 123,456,789"):
        assert part in text
    assert any(line.endswith("50% busy, waits 33% slot 33% weights 33% others") for line in lines)


def test_steps_are_those_that_were_learned_from() -> None:
    """Others have arrived and wait for the next updates: at the end the number is that of the run's last line."""
    arrived = Counts(steps_delivered=1250)
    assert "steps 1,000 (+250 waiting)" in "\n".join(shown(RECORD, 120, arrived))
    at_the_end = "\n".join(shown(RECORD, 120, arrived, is_closed=True))
    assert "steps 1,000 " in at_the_end
    assert "waiting)" not in at_the_end
    assert " 25% of 4,000 steps" in at_the_end


def test_a_mean_over_no_episode_is_a_dash() -> None:
    record = {**RECORD, "return_mean": math.nan, "length_mean": math.nan}
    assert "return=– " in lines(record, AlgorithmTraits())[1]
    text = "\n".join(shown(record, 120))
    assert "return – " in text
    assert "length – " in text
    assert "nan" not in text


def test_a_display_without_updates_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.telemetry.terminal.SILENT_SECONDS", 0.0)
    assert any(line.endswith("s: updating") for line in shown(RECORD, 80))
