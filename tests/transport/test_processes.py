"""Processes behave alike on the systems that freerun runs on."""

from __future__ import annotations

import os

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
