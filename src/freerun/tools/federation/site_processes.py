"""The sites of a local federation, each in a process of its own. A site that dies comes back from its checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import cloudpickle

from freerun.core import CallbackFailure, EnvFailure, LearnerFailure, UserError
from freerun.run.resume import newest
from freerun.settings.config import AnyConfig
from freerun.tools.federation.site_training import run_site
from freerun.transport import processes

logger = logging.getLogger("freerun")

LEAVE_SECONDS = 60.0
"""The time that sites get to save their results at the end."""
MAX_RETURNS = 3
"""A site that dies more often than this stays away: whatever kills it will do so again."""


class SiteProcesses:
    """Starts sites, and starts those again that die."""

    def __init__(self, configs: Mapping[str, AnyConfig], sockets: Mapping[str, Path]):
        self._configs, self._sockets = configs, sockets
        self._running: dict[Connection, tuple[str, SpawnProcess]] = {}
        self._num_returns = dict.fromkeys(configs, 0)
        for name in configs:
            self._start(name, is_back=False)

    @property
    def connections(self) -> list[Connection]:
        """Where sites that run say how they have ended."""
        return list(self._running)

    def _start(self, name: str, is_back: bool) -> None:
        payload = cloudpickle.dumps((self._configs[name], self._sockets[name], name, is_back))
        process, connection = processes.start_server(_serve, payload)
        self._running[connection] = (name, process)

    def hear(self, connection: Connection) -> tuple[str, str | None]:
        """Take the last word of a site: its name, and why it failed, if it did. A site that died without a word is
        started again."""
        name, process = self._running.pop(connection)
        try:
            failure: str | None = connection.recv()
        except EOFError:
            process.join(processes.EXIT_SECONDS)
            has_checkpoint = (Path(str(self._configs[name].run_dir)) / "config.json").exists()
            if self._num_returns[name] == MAX_RETURNS or not has_checkpoint:
                return name, f"its process has died with exit code {process.exitcode}"
            self._num_returns[name] += 1
            logger.warning(
                "%s has died with exit code %s, and goes on from its last checkpoint", name, process.exitcode
            )
            self._start(name, is_back=True)
            return name, None
        return name, failure

    def close(self, are_told: bool) -> None:
        """Wait until all sites have saved their results. Interrupt them, unless an order has told them to end."""
        running = [process for _, process in self._running.values()]
        if not are_told:
            for process in running:
                process.terminate()
        processes.stop(running, LEAVE_SECONDS)


def _serve(connection: Connection, payload: bytes) -> None:
    """Train as a site; at the end, send why it failed, or None."""
    # Ctrl-C in a terminal reaches the whole process group; the federation ends its sites itself.
    os.setpgrp()
    processes.end_with_parent()
    config: Any
    config, socket, name, is_back = cloudpickle.loads(payload)
    failure = None
    try:
        run_site(config, socket, name, newest(Path(config.run_dir)) if is_back else None)
    except (UserError, EnvFailure, LearnerFailure, CallbackFailure) as error:
        failure = str(error)
    connection.send(failure)
