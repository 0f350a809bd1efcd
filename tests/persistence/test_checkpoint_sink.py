"""Checkpoints are written at the right moments."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freerun.persistence.checkpoint import Checkpoints, names
from freerun.persistence.checkpoint_sink import CheckpointSink, Interval


@dataclass
class Ledger:
    version: int = 0
    has_untrained_steps: bool = False


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(
    ("every", "save_seconds", "saved"),
    [
        ("60s", 0.0, [0, 1, 2, 3]),  # each took 4 s, which is more than 2
        ("60s", 3.0, [0, 1, 3]),  # after 4 s a checkpoint would take most of the time, after 31 s less than a tenth
        ("never", 0.0, [0]),
    ],
)
def test_long_updates_are_saved_as_soon_as_they_are_complete(
    every: str, save_seconds: float, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ledger = Clock(monkeypatch), Ledger()

    def state(metrics: Mapping[str, float]) -> tuple[dict[str, Any], bytes]:
        clock.now += save_seconds if ledger.version else 0.0
        return {"update": ledger.version}, b"policy %d" % ledger.version

    sink = CheckpointSink(Checkpoints(tmp_path, 10), Interval.read(every), ledger, state, 0, False, long_seconds=2.0)
    sink.save()
    for seconds in (4.0, 4.0, 31.0):
        clock.now += seconds
        ledger.version += 1
        sink.write(100 * ledger.version, {})
    assert names(tmp_path) == [f"update-{update:09}" for update in saved]
    assert sink.saved_update == saved[-1]
    assert sink.saved_policy() == b"policy %d" % saved[-1]


def test_short_updates_wait_for_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ledger = Clock(monkeypatch), Ledger()
    sink = CheckpointSink(
        Checkpoints(tmp_path, 10), Interval.read("10s"), ledger, lambda _: ({}, b""), 0, False, long_seconds=2.0
    )
    for _ in range(21):
        clock.now += 1.0
        ledger.version += 1
        sink.write(ledger.version, {})
    assert names(tmp_path) == ["update-000000010", "update-000000020"]
