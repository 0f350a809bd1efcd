"""A process of `executor` that is killed in the middle of a message must not keep the run from ending."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import preloaded_python
import pytest


@pytest.mark.slow
def test_a_run_ends_although_half_a_message_was_left_to_its_pool(tmp_path: Path) -> None:
    said = tmp_path / "said"
    flags = ["--mode", "executor", "--num-workers", "2", "--max-episode-steps", "20", "-q"]
    flags += ["--env-args", f"said={said}", "--run-dir", str(tmp_path / "run")]
    process = preloaded_python.Process(
        ["-m", "freerun", "train", "half_message_env:HalfMessage", *flags],
        cwd=Path(__file__).parents[1],  # where the environment is
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 100
        while not said.exists():
            assert process.poll() is None, "the run has ended"
            assert time.monotonic() < deadline, "the environment has not been stepped"
            time.sleep(0.05)
        time.sleep(0.5)  # the pool's thread begins to read
        process.send_signal(signal.SIGTERM)
        process.wait(100)
    finally:
        process.kill()
        process.wait(10)
