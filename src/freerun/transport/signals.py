"""Ctrl-C, SIGTERM and SIGHUP: the first lets an update finish, the second (or ten seconds) does not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

GRACE_SECONDS = 10.0
"""Machines that may be taken away give half a minute or more between SIGTERM and the end."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP comes when a terminal is closed; under nohup it is ignored, and stays so."""


@contextlib.contextmanager
def interruptible(is_at_rest: Callable[[], bool], ask_to_stop: Callable[[], None]) -> Iterator[None]:
    """While this lasts, a signal raises KeyboardInterrupt: at once where that spoils nothing, else when asked to.

    Only a program's main thread may handle signals: elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_signals = 0
    timer = threading.Timer(GRACE_SECONDS, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1 or is_at_rest():
            raise KeyboardInterrupt
        ask_to_stop()
        timer.start()

    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
