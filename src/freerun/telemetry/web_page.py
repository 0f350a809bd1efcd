"""Runs `freerun watch` in a process of its own, which only reads the run folder and does not slow the learner down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from freerun.core import UserError

CLOSE_SECONDS = 3.0


class WebPage:
    """A web server for one run."""

    def __init__(self, run_dir: Path):
        """Show this run: beside the other runs if it lies in a folder named runs, else alone."""
        shown = [str(run_dir.parent), "--selected", run_dir.name] if run_dir.parent.name == "runs" else [str(run_dir)]
        command = [sys.executable, "-m", "freerun", "watch", *shown, "--until-input-ends"]
        # In a session of its own the server does not get the Ctrl-C that is meant for the run. Its input is a pipe that
        # the kernel closes when this process ends, however that happens: so the server ends too.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            _, errors = self._process.communicate()
            raise UserError(errors.strip().removeprefix("freerun: ") or "freerun watch did not start")

    def close(self) -> None:
        try:
            self._process.communicate(timeout=CLOSE_SECONDS)  # this closes the input of the server, which then ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
