"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freerun import registry
from freerun.transport import processes, slots

# Before the first worker of the session starts, as `experiment.run` would.
torch.set_num_threads(1)  # as in a run: threads that wait for each other are slow where cores are shared
slots.POISON = True
processes.preload([*registry.WORKER_MODULES, "toy_envs"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
