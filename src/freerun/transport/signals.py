"""Ctrl-C, SIGTERM and SIGHUP: the first signal lets the update finish; a second one, or a few seconds, do not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

GRACE_SECONDS = 2.0
"""An update that takes longer is given up, so that the whole run has ended five seconds after the signal."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal that is closed sends SIGHUP. Under nohup it is ignored, and stays ignored."""


@contextlib.contextmanager
def interruptible(can_stop_now: Callable[[], bool], ask_to_stop: Callable[[], None]) -> Iterator[None]:
    """Within it, a signal raises KeyboardInterrupt: at once if `can_stop_now`, else `ask_to_stop` is called first.

    Python lets only the main thread handle signals. In another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_signals = 0
    # The timer sends a second signal instead of raising: an exception can be raised only in the thread it happens in,
    # and the kernel delivers a signal to the main thread also while that waits in a system call.
    timer = threading.Timer(GRACE_SECONDS, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        # Python runs handlers in the main thread only, and looks for signals at calls and jumps, not within an
        # addition: so the counter needs no lock, and of two signals at once the second sees the first.
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1 or can_stop_now():
            raise KeyboardInterrupt
        ask_to_stop()
        timer.start()

    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(thread: threading.Thread) -> None:
    """Raise KeyboardInterrupt in a thread that is not the main one, as soon as it runs Python code again."""
    if thread.ident is not None:
        # The only way to reach another thread. A thread that waits inside C code sees the exception when it returns.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
