"""How much of the machine is used by this program, and how much by others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans over")
def test_orphans_count_as_this_program_where_it_asks_for_them(tmp_path: Path) -> None:
    """In a process of its own, because what it asks for holds for good. Its child leaves a process behind."""
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "from freerun.tools.bench.load_meter import adopt_orphans, own_seconds\n"
        "adopt_orphans()\n"
        "before = own_seconds()\n"
        f"burn = {BURN!r} + '\\nprint(1)'\n"
        "leave = 'import subprocess, sys; subprocess.Popen([sys.executable, \"-c\", sys.argv[1]])'\n"
        "with subprocess.Popen([sys.executable, '-c', leave, burn], stdout=subprocess.PIPE) as parent:\n"
        "    parent.stdout.read()\n"  # until the orphan has printed and ended
        "print(own_seconds() - before)\n"
    )
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    assert float(done.stdout) > 0.35
