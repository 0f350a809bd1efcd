"""The layer rule of the design, and workers that stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from freerun import registry

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


def test_the_loop_fits_a_screen() -> None:
    source = (ROOT / "src" / "freerun" / "training.py").read_text()
    loop = source[source.index("def train(") :]
    assert len(loop.splitlines()) < 60
