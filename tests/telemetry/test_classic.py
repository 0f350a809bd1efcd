"""The lines that users of the original know, from a real run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import freerun
from freerun.core import UserError


def test_collecting_collected_update_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freerun.train(
        "CartPole-v1",
        mode="pipes",
        num_workers=2,
        total_episodes=40,
        episodes_per_update=20,
        display="classic",
        run_dir=tmp_path / "run",
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("Collecting 20 episodes asynchronously...") == 2
    assert sum(line.startswith("Update complete: update=") for line in lines) == 2
    collected = [line for line in lines if line.startswith("Collected 20 episodes in ")]
    assert len(collected) == 2
    assert re.fullmatch(r"Collected 20 episodes in [\d.]+s \([\d.]+ eps/sec\)", collected[0])
    assert any(re.fullmatch(r"  20/20 episodes \([\d.]+ eps/sec\)", line) for line in lines)


def test_it_counts_episodes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give --episodes-per-update"):
        freerun.train("CartPole-v1", total_steps=100, display="classic", run_dir=tmp_path / "run")
