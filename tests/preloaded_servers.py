"""Starts the processes of `processes.server_context` without paying for `import torch` each time.

Learners and trainers of a sweep are spawned by a run: Python starts anew and imports torch. Here a fork server of their
own, besides that of the workers, has imported it already. Runs that a test starts in a process of their own spawn
theirs as always, so spawning stays tested.
"""

from __future__ import annotations

from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock

import preloaded_python

_server: Any = forkserver.ForkServer()
_server.set_forkserver_preload(list(preloaded_python.PRELOADED))


class _Launch(popen_forkserver.Popen):
    def _launch(self, process: Any) -> None:
        # Python has one fork server, and no way to name another one.
        with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            super()._launch(process)  # type: ignore[misc]


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        return _Launch(process)


class ServerContext(ForkServerContext):
    """A context as `multiprocessing.get_context` returns it."""

    Process = _Process
