"""`freerun watch` in a process beside the run: it reads the run folder, and takes nothing from the learner but disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from freerun.core import UserError

CLOSE_SECONDS = 3.0


class WebPage:
    def __init__(self, run_dir: Path):
        """Runs under runs/ can be compared with each other; one elsewhere is shown alone."""
        shown = [str(run_dir.parent), "--selected", run_dir.name] if run_dir.parent.name == "runs" else [str(run_dir)]
        command = [sys.executable, "-m", "freerun", "watch", *shown, "--until-input-ends"]
        # A session of its own: Ctrl-C is for the run. Its input ends when this process does, however that happens.
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
            _, words = self._process.communicate()
            raise UserError(words.strip().removeprefix("freerun: ") or "freerun watch did not start")

    def close(self) -> None:
        try:
            self._process.communicate(timeout=CLOSE_SECONDS)  # closes its input
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
