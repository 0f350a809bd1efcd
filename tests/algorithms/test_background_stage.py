"""Work beside the learner, and what an interrupt leaves of it."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from freerun.algorithms.mbpo.stage import BackgroundStage


def test_work_is_not_forgotten_if_waiting_for_it_is_interrupted() -> None:
    """Otherwise nobody would stop it, and Python waits for its thread before it exits."""
    stage: BackgroundStage[int] = BackgroundStage("test", torch.device("cpu"))
    may_end = threading.Event()
    stage.start(lambda: int(may_end.wait(60)))
    try:
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            stage.finish()
        assert stage.is_busy
        assert not stage.ends_within(0.0)
    finally:
        may_end.set()
    assert stage.ends_within(60)
    assert stage.finish() == 1
    assert not stage.is_busy
