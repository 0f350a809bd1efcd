"""`--watch`: the page in a process of its own, as long as the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

import freerun
from freerun.core import UserError
from freerun.telemetry.web_page import WebPage


def test_a_run_has_a_page_while_it_goes_on(run_dir: Path) -> None:
    result = freerun.train("CartPole-v1", total_steps=500, num_workers=1, quiet=True, watch=True, run_dir=run_dir)
    assert result.page is not None
    assert result.page.startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(result.page)


def test_runs_of_one_folder_can_be_compared_others_cannot_be_seen(tmp_path: Path) -> None:
    for place, name in ((tmp_path / "runs", "runs/one"), (tmp_path / "elsewhere", "one")):
        for run in ("one", "two"):
            (place / run).mkdir(parents=True)
            (place / run / "config.json").write_text('{"env": "CartPole-v1"}')
        page = WebPage(place / "one")
        with urllib.request.urlopen(page.url.replace("/?", "/api/runs?")) as answer:
            found = answer.read().decode()
        page.close()
        assert ('"two"' in found) == (name == "runs/one")


def test_a_page_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        WebPage(tmp_path / "none")


def test_the_page_goes_when_its_run_is_killed(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
import psutil
from freerun.telemetry.web_page import WebPage
page = WebPage(Path({str(tmp_path)!r}))
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    page = psutil.Process(int(starter.stdout.readline()))
    os.kill(starter.pid, signal.SIGKILL)
    starter.communicate()
    psutil.wait_procs([page], timeout=20)
    assert not page.is_running()
