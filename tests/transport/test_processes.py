"""Processes behave alike on the systems that freerun runs on."""

from __future__ import annotations

import gc
import os
from multiprocessing import util
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
    """Garbage that only the collector finds. It registers a finalizer, and leaves garbage of its kind behind."""

    def __init__(self, registered: list[Any]):
        self.registered, self.me = registered, self

    def __del__(self) -> None:
        self.registered.append(util.Finalize(None, str, exitpriority=0))
        if len(self.registered) < 300:
            RegistersWhenCollected(self.registered)


def test_what_is_collected_meanwhile_may_register_finalizers() -> None:
    registered: list[Any] = [util.Finalize(None, str, exitpriority=0) for _ in range(100)]
    # Python uses pairs that nobody has any more again, which starts no collection. So here all of them are in use.
    pairs = [(number, registered) for number in range(5000)]
    thresholds = gc.get_threshold()
    try:
        with processes.nameless_semaphores():
            RegistersWhenCollected(registered)
            gc.set_threshold(1)  # from here on every new object starts a collection
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()
        for finalizer in registered:
            finalizer.cancel()
    assert len(registered) > 100
    assert len(pairs) == 5000
