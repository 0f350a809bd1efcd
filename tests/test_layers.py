"""The layer rule of the design, and workers that stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from freerun.settings import registry

ROOT = Path(__file__).parents[1]


def test_layers_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_workers_import_holds_no_torch() -> None:
    imports = "; ".join(f"import {name}" for name in registry.WORKER_MODULES)
    command = f"{imports}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_are_forked_from_a_server_that_has_loaded_what_they_need() -> None:
    """Else each loads it again: a hundred workers then take 20 s to start instead of one, and four times the memory."""
    command = """
from multiprocessing import forkserver
from freerun.settings.defaults import complete
from freerun.core import StartPoint
from freerun.settings.factories import make_algorithm, make_factory
from freerun.run.pool import Pool
from freerun.settings.registry import make_config

config = complete(make_config({"env": "CartPole-v1", "num_workers": 1}))
pool = Pool(make_factory(config))
pool.collector(config, make_algorithm(config, pool.factory), StartPoint())
print("numpy" in open(f"/proc/{forkserver._forkserver._forkserver_pid}/maps").read())
pool.close()
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_loop_fits_a_screen() -> None:
    source = (ROOT / "src" / "freerun" / "training.py").read_text()
    loop = source[source.index("def train(") :]
    assert len(loop.splitlines()) < 60
