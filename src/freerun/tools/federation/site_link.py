"""How a site is reached from another process of its machine: an order and an answer per connection, without pickle."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.numpy
from safetensors import SafetensorError

from freerun.core import UserError
from freerun.tools.federation.federation_options import Share
from freerun.tools.federation.shared_state import SharedState, unpack_moments

DESCRIBE, TRAIN, FINISH = "describe", "train", "finish"
"""The orders: say what you have learned; load these weights and train a round; load these weights and end."""
FAMILY = "AF_UNIX"
READ_SECONDS = 60.0
"""Whoever has begun a message sends the rest of it within this time."""
RETRY_SECONDS = 0.2
LONGEST_PATH = 100
"""A few characters less than the name of a Unix socket may have."""


class SiteFailure(Exception):
    """A site did not do what it was asked for; the text says why."""


class SiteMessage(NamedTuple):
    """An order or its answer."""

    header: dict[str, Any]
    shared: SharedState


def listen(socket: Path) -> Listener:
    """Listen where only this user may connect. A socket that a killed site has left behind is replaced."""
    if len(os.fsencode(socket)) > LONGEST_PATH:
        raise UserError(f"--listen {socket} is too long for the name of a socket: name a shorter path")
    _remove_leftover(socket)
    before = os.umask(0o177)
    try:
        return Listener(str(socket), FAMILY)
    except OSError as error:
        raise UserError(f"--listen {socket} cannot be used: {error.strerror}") from None
    finally:
        os.umask(before)


def _remove_leftover(socket: Path) -> None:
    """Remove a socket at which nobody listens. Anything else at its place is not ours to remove."""
    if not socket.is_socket():
        if socket.exists():
            raise UserError(f"--listen {socket} cannot be used: there is a file of this name that is no socket")
        return
    try:
        Client(str(socket), FAMILY).close()
    except (ConnectionRefusedError, FileNotFoundError):
        socket.unlink(missing_ok=True)
    else:
        raise UserError(f"--listen {socket} cannot be used: another site listens there")


def send(connection: Connection, header: Mapping[str, Any], shared: SharedState | None = None) -> None:
    shared = shared or SharedState()
    connection.send_bytes(json.dumps(header).encode())
    connection.send_bytes(safetensors.numpy.save(shared.weights))
    connection.send_bytes(shared.packed_moments())


def receive(connection: Connection) -> SiteMessage:
    """Read what `send` wrote. Raise UserError for anything else."""
    parts = []
    for _ in range(3):
        if not connection.poll(READ_SECONDS):
            raise UserError(f"the rest of a message did not come within {READ_SECONDS:g} s")
        parts.append(connection.recv_bytes())
    try:
        header = json.loads(parts[0])
        weights = safetensors.numpy.load(parts[1])
    except (ValueError, SafetensorError) as error:
        raise UserError(f"a message cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise UserError("a message has no header")
    return SiteMessage(header, SharedState(weights, unpack_moments(parts[2])))


class SiteLink:
    """The way to a site that listens at a socket."""

    def __init__(
        self, socket: Path, reach_seconds: float = 120.0, answer_seconds: float = 3600.0, share: Share = "all"
    ):
        """Wait `reach_seconds` for a site that is not there, because it may come back."""
        self._socket, self._share = socket, share
        self._reach_seconds, self._answer_seconds = reach_seconds, answer_seconds

    def describe(self) -> SiteMessage:
        return self._ask({"order": DESCRIBE})

    def train(self, shared: SharedState, num_updates: int, proximal: float = 0.0) -> SiteMessage:
        return self._ask({"order": TRAIN, "updates": num_updates, "proximal": proximal}, shared)

    def finish(self, shared: SharedState) -> SiteMessage:
        return self._ask({"order": FINISH}, shared)

    def _ask(self, header: Mapping[str, Any], shared: SharedState | None = None) -> SiteMessage:
        with self._connect() as connection:
            try:
                send(connection, {**header, "share": self._share}, shared)
                if not connection.poll(self._answer_seconds):
                    raise SiteFailure(f"the site at {self._socket} did not answer within {self._answer_seconds:g} s")
                answer = receive(connection)
            except (EOFError, ConnectionError):
                raise SiteFailure(f"the site at {self._socket} died while it was asked to {header['order']}") from None
        if answer.header.get("error"):
            raise SiteFailure(str(answer.header["error"]))
        return answer

    def _connect(self) -> Any:
        deadline = time.monotonic() + self._reach_seconds
        while True:
            try:
                return Client(str(self._socket), FAMILY)
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise SiteFailure(f"there is no site at {self._socket}") from None
                time.sleep(RETRY_SECONDS)
