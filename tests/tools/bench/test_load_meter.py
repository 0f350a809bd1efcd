"""How much of the machine is used by this program, and how much by others."""

from __future__ import annotations

import subprocess
import sys

from freerun.tools.bench.load_meter import own_seconds

BURN = "import time\nwhile time.process_time() < 0.4: pass"


def test_processes_that_have_ended_count_as_this_program() -> None:
    """Their time was taken for that of other programs, so a benchmark that starts many called a quiet machine busy."""
    before = own_seconds()
    # The shell lives on after its child has ended, as a fork server does after its workers.
    command = f"'{sys.executable}' -c '{BURN}'; echo done; read line"
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdin is not None
        assert shell.stdout.readline() == "done\n"
        assert own_seconds() - before > 0.35
        shell.stdin.write("\n")
    assert own_seconds() - before > 0.35
