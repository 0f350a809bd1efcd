"""How busy the machine is."""

from __future__ import annotations

import pytest

from freerun.telemetry import machine
from freerun.telemetry.machine import Machine


def test_it_says_how_busy_the_cores_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "EVERY_SECONDS", 0.0)
    metrics = Machine(gpu=None).read(0)
    assert metrics.keys() == {"cpu_percent"}
    assert 0 <= metrics["cpu_percent"] <= 100


def test_it_is_not_asked_more_often_than_it_has_something_to_say() -> None:
    assert Machine(gpu=None).read(0) == {}


def test_a_gpu_that_nobody_can_ask_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "EVERY_SECONDS", 0.0)
    assert "cpu_percent" in Machine(gpu=99).read(0)
