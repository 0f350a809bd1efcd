"""Waits for many workers at once: for their messages, and for the end-of-file of a worker that died."""

from __future__ import annotations

import contextlib
import os
import selectors
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

Sender = TypeVar("Sender")


class MessageHub(Generic[Sender]):
    """Blocks until a connection can be read, and says which senders are ready.

    Connections are registered once (epoll on Linux), so that waiting for a hundred workers costs no more than for one.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        # A pipe to oneself: another thread writes a byte into it to end a `ready` that has no timeout.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    def add(self, connection: Connection, sender: Sender) -> None:
        """Wait for this connection too. `ready` then names it by `sender`."""
        self._selector.register(connection, selectors.EVENT_READ, sender)

    def remove(self, connection: Connection) -> None:
        self._selector.unregister(connection)

    def wake(self) -> None:
        """Make a `ready` in another thread return."""
        # The pipe may be full of wake-ups that nobody has read yet. Then the other thread wakes up anyway.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def ready(self, timeout_seconds: float | None = None) -> list[Sender]:
        """The senders that have a message or an end-of-file; an empty list after a timeout or a `wake`."""
        senders = []
        for key, _ in self._selector.select(timeout_seconds):
            if key.fd == self._wake_read:
                # Wake-ups that have come together count once. More than 4096 of them make the next call return too.
                os.read(self._wake_read, 4096)
            else:
                senders.append(key.data)
        return senders

    def close(self) -> None:
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
