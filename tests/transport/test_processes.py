"""Processes behave alike on the systems that freerun runs on."""

from __future__ import annotations

import gc
import os
from multiprocessing import util
from types import SimpleNamespace
from typing import Any

import pytest

from freerun.tools.probe.measure import num_cores
from freerun.transport import processes


def test_the_cores_are_those_that_this_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(mine)})
        assert processes.usable_cores() == [max(mine)]
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_all_cores_count_where_a_process_cannot_be_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which has no `sched_getaffinity`."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert processes.usable_cores() == [0, 1, 2, 3, 4]
    assert num_cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processes.usable_cores() == [0]


class RegistersWhenCollected:
    """Garbage that only the collector finds. It does what finalizers and other threads may do at any moment."""

    def __init__(self, registry: dict[Any, Any]):
        self.registry, self.me = registry, self

    def __del__(self) -> None:
        self.registry[object()] = SimpleNamespace(_callback=None)


def test_what_is_collected_meanwhile_may_register_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[Any, Any] = {key: SimpleNamespace(_callback=None) for key in range(1000)}
    monkeypatch.setattr(util, "_finalizer_registry", registry)
    thresholds = gc.get_threshold()
    try:
        with processes.nameless_semaphores():
            gc.collect()
            gc.set_threshold(300)
            RegistersWhenCollected(registry)
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()
    assert len(registry) > 1000
