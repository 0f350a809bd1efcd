"""What the janitor of a private Ray clears away when the learner is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

LEARNER = """
import pathlib, subprocess, sys, time
from freerun.transport.janitor import Janitor

PARENT = '''
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(sleep, stdout=subprocess.DEVNULL).pid, flush=True)
'''

def main():
    folder = pathlib.Path(sys.argv[1])
    janitor = Janitor(folder)
    janitor.look()
    with open(folder / "log", sys.argv[2]) as log:  # the parent ends at once: who sleeps is nobody's child
        subprocess.run([sys.executable, "-c", PARENT], stdin=log)
    time.sleep(60)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("mode", "is_ended"), [("w", True), ("r", False)])
def test_a_stray_process_that_writes_to_the_folder_is_ended_and_one_that_reads_is_not(
    mode: str, is_ended: bool, tmp_path: Path
) -> None:
    script, folder = tmp_path / "learner.py", tmp_path / "folder"
    script.write_text(LEARNER)
    folder.mkdir()
    (folder / "log").touch()
    command = [sys.executable, str(script), str(folder), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        stray = psutil.Process(int(learner.stdout.readline()))
        learner.kill()
    try:
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not folder.exists()
        assert stray.is_running() != is_ended
    finally:
        if stray.is_running():
            stray.kill()
