"""Waiting for many workers at once: their messages, and the end-of-file of one that died."""

from __future__ import annotations

import contextlib
import os
import selectors
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

Peer = TypeVar("Peer")


class Hub(Generic[Peer]):
    """Blocks until some peer has something to say; registered once, so that a hundred peers cost no more than one."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    def add(self, connection: Connection, peer: Peer) -> None:
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def remove(self, connection: Connection) -> None:
        self._selector.unregister(connection)

    def wake(self) -> None:
        """Make a `ready` in another thread return."""
        with contextlib.suppress(BlockingIOError):  # full of wake-ups that nobody has read: one more says nothing new
            os.write(self._wake_write, b"!")

    def ready(self, timeout_seconds: float | None = None) -> list[Peer]:
        peers = []
        for key, _ in self._selector.select(timeout_seconds):
            if key.fd == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                peers.append(key.data)
        return peers

    def close(self) -> None:
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
