"""The load of the machine is measured."""

from __future__ import annotations

from freerun.telemetry.machine_load import MachineLoad


def test_it_says_how_busy_the_cores_were() -> None:
    machine = MachineLoad(gpu=None)
    assert machine.read(0) == {}  # nothing was measured yet
    metrics = machine.measure()
    assert machine.read(0) == metrics
    assert metrics.keys() == {"cpu_percent"}
    assert 0 <= metrics["cpu_percent"] <= 100


def test_a_gpu_that_nobody_can_ask_is_left_out() -> None:
    assert "cpu_percent" in MachineLoad(gpu=99).measure()
