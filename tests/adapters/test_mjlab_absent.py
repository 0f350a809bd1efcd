"""What is said where mjlab is not installed; `make test-mjlab` tests the real one."""

from __future__ import annotations

import importlib.util

import pytest

import freerun
from freerun.core import UserError


@pytest.mark.skipif(importlib.util.find_spec("mjlab") is not None, reason="mjlab is installed")
def test_mjlab_must_be_installed() -> None:
    with pytest.raises(UserError, match="mjlab is not installed here"):
        freerun.train("mjlab:Mjlab-Cartpole-Balance", num_envs=2, total_steps=10, quiet=True)
