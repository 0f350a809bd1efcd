"""A real run prints the lines that users of the original system know."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import freerun
from freerun.core import Counts, UserError
from freerun.telemetry.classic_lines import ClassicLines


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


@pytest.mark.parametrize("mode", ["sync", "sequential"])
def test_what_takes_turns_is_not_called_asynchronous(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"total_episodes": 4, "episodes_per_update": 4, "num_workers": 1 if mode == "sequential" else 2}
    freerun.train("CartPole-v1", mode=mode, display="classic", run_dir=tmp_path / "run", **settings)
    assert "Collecting 4 episodes..." in capsys.readouterr().out.splitlines()


def test_it_counts_episodes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give --episodes-per-update"):
        freerun.train("CartPole-v1", total_steps=100, display="classic", run_dir=tmp_path / "run")


def test_episodes_that_arrive_ahead_of_an_update_belong_to_the_next_round() -> None:
    """All of the second round had arrived before the first update ended, and its line was never printed."""
    printed = io.StringIO()
    delivered = [0]
    lines = ClassicLines("title", lambda: Counts(episodes_delivered=delivered[0]), 20, Console(file=printed))
    for update, arrived in enumerate((40, 40), start=1):
        delivered[0] = arrived
        lines.write(0, {"update": update, "episodes": 20 * update, "return_mean": 0.0, "progress": update / 2})
    lines.close()
    assert printed.getvalue().count("Collected 20 episodes in ") == 2
