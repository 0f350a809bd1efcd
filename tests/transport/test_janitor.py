"""The janitor of a private Ray cluster cleans up when the learner is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

LEARNER = """
import pathlib, sys, time
from freerun.transport.janitor import Janitor

def main():
    janitor = Janitor(pathlib.Path(sys.argv[1]))
    janitor.list_processes()
    print("ready", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    main()
"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize(("mode", "is_ended"), [("w", True), ("r", False)])
def test_a_stray_process_that_writes_to_the_folder_is_ended_and_one_that_reads_is_not(
    mode: str, is_ended: bool, tmp_path: Path
) -> None:
    """The stray was never a child of the learner: only the file that it has open says whose it is."""
    script, folder = tmp_path / "learner.py", tmp_path / "folder"
    script.write_text(LEARNER)
    folder.mkdir()
    (folder / "log").touch()
    with (folder / "log").open(mode) as log, subprocess.Popen(SLEEP, stdin=log) as stray:
        try:
            command = [sys.executable, str(script), str(folder)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as learner:
                assert learner.stdout is not None
                log.close()  # the stray alone has it open now
                assert learner.stdout.readline() == "ready\n"
                learner.kill()
            deadline = time.monotonic() + 30
            while folder.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not folder.exists()
            assert (stray.poll() is not None) == is_ended
        finally:
            stray.kill()
