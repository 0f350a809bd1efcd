"""A whole training by `freerun train`, with all the outputs that it has by default: PPO learns all the while."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measuring
from workloads import Workload

ENDLESS = ("--total-steps", str(10**9))
SECONDS_BETWEEN_LOOKS = 0.005


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    flags = [part for flag, value in workload.freerun_flags.items() for part in (f"--{flag}", str(value))]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "freerun", "train", workload.env_id, *flags, *ENDLESS]
        metrics = Path(folder) / "run" / "metrics.jsonl"
        # No pipe for its errors: nobody reads it here, and a full one would stop the training.
        with subprocess.Popen(
            [*command, "--run-dir", str(metrics.parent)], stdout=subprocess.DEVNULL, stderr=errors
        ) as training:

            def latest() -> tuple[int, int]:
                """The steps and episodes of the training so far."""
                lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
                record = json.loads(lines[-1]) if lines else {"step": 0, "episodes": 0}
                return record["step"], record["episodes"]

            seen = 0, 0

            def advance() -> tuple[int, int]:
                """Wait for the next update."""
                nonlocal seen
                while (found := latest()) == seen:
                    if training.poll() is not None:
                        errors.seek(0)
                        raise RuntimeError(errors.read().decode())
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                before, seen = seen, found
                return found[0] - before[0], found[1] - before[1]

            try:
                yield advance
            finally:
                training.terminate()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
