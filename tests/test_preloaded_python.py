"""Programs that tests start through `preloaded_python` are processes as any others are."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import preloaded_python
import psutil
import pytest

HELD_UP = "import time; print('here', flush=True); time.sleep(60)"


def test_it_has_the_arguments_the_folder_the_environment_and_the_input_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, tempfile\nfrom beside import NAME\n"
        "class Mine: pass\n"
        "main = sys.modules['__main__']\n"
        "print(sys.argv, os.getcwd(), os.environ['COLOUR'], NAME, main.Mine is Mine, main.__file__, sys.stdin.read())\n"
        "print(tempfile.gettempdir(), 'HOME' in os.environ, file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    inside = tmp_path / "inside"
    inside.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"COLOUR": "blue", "TMPDIR": str(inside)}
    text = "some input " * 10_000  # more than fits into a pipe
    done = preloaded_python.run("../script.py", "--flag", cwd=inside, env=environment, input=text)
    assert done.returncode == 3
    assert done.stdout == f"{['../script.py', '--flag']} {inside} blue beside True {script} {text}\n"
    assert done.stderr == f"{inside} False\n"


def test_a_module_is_run_as_python_would_run_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nprint(__name__, __package__, __spec__.name, sys.path[0])\n")
    done = preloaded_python.run("-m", "package", cwd=tmp_path)
    assert done.stdout == f"__main__ package package.__main__ {tmp_path}\n", done.stderr
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])}
    assert preloaded_python.run("-m", "package", env=path).stdout.startswith("__main__ package"), "found by PYTHONPATH"


def test_it_ends_as_an_interpreter_does() -> None:
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('main')\n"
        "raise KeyError('oh')\n"
    )
    done = preloaded_python.run("-c", code)
    assert done.returncode == 1
    assert done.stdout == "main\nthread\nat exit\n"
    assert done.stderr.endswith("KeyError: 'oh'\n")


def test_nothing_of_the_starter_or_of_other_programs_is_open_in_it() -> None:
    """An end of a pipe that stays open somewhere keeps its reader waiting."""
    other = preloaded_python.Process(["-c", HELD_UP], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    code = "import os; print(*sorted(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"
    done = preloaded_python.run("-c", code)
    assert done.stdout == "0 1 2 3 1\n", "the fourth is the one that lists them; and there is one thread"
    other.kill()
    other.communicate(timeout=20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_reach_it_and_are_told(number: signal.Signals) -> None:
    process = preloaded_python.Process(["-c", HELD_UP], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == process.wait() == process.poll() == -number
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert not psutil.pid_exists(process.pid)
    process.kill()  # which is nobody's any more


def test_it_leads_a_session_if_it_should() -> None:
    process = preloaded_python.Process(["-c", HELD_UP], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_variables_that_were_read_already_are_refused() -> None:
    with pytest.raises(ValueError, match="OMP_NUM_THREADS is read when modules are imported: use subprocess"):
        preloaded_python.run("-c", "", env={**os.environ, "OMP_NUM_THREADS": "7"})
