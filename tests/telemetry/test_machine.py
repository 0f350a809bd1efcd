"""How busy the machine is."""

from __future__ import annotations

from freerun.telemetry.machine import Machine


def test_it_says_how_busy_the_cores_were() -> None:
    machine = Machine(gpu=None)
    assert machine.read(0) == {}  # nobody has looked yet
    metrics = machine.look()
    assert machine.read(0) == metrics
    assert metrics.keys() == {"cpu_percent"}
    assert 0 <= metrics["cpu_percent"] <= 100


def test_a_gpu_that_nobody_can_ask_is_left_out() -> None:
    assert "cpu_percent" in Machine(gpu=99).look()
