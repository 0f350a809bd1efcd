"""A run that makes no update for a while says what it is waiting for."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from leftovers import OutsideRun

import freerun
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import Counts, Demand, Metrics
from freerun.settings.factories import episode_remedy
from freerun.settings.registry import make_config
from freerun.telemetry import waiting
from freerun.telemetry.time_shares import LearnerActivity
from freerun.telemetry.waiting import describe

REMEDY = "give --max-episode-steps"
STEPS = LearnerActivity("waiting", Demand(steps=2048), steps=1000, episodes=3)
EPISODES = LearnerActivity("waiting", Demand(episodes=8), steps=1000, episodes=3)


@pytest.mark.parametrize(
    ("activity", "counts", "remedy", "said"),
    [
        (LearnerActivity("updating"), Counts(), None, "updating"),
        (LearnerActivity("waiting", Demand()), Counts(), None, "waiting"),
        (
            LearnerActivity("waiting", Demand(steps=2048)),
            Counts(step_calls=84_300),
            REMEDY,
            "0 of 2,048 steps handed over: no episode has ended yet (84,300 calls of step and reset so far); " + REMEDY,
        ),
        (
            LearnerActivity("waiting", Demand(steps=2048)),
            Counts(),
            REMEDY,
            f"0 of 2,048 steps handed over: no episode has ended yet; {REMEDY}",
        ),
        (
            STEPS,
            Counts(steps_delivered=1000, episodes_delivered=3),
            REMEDY,
            f"0 of 2,048 steps handed over: no episode has ended since the last update; {REMEDY}",
        ),
        (STEPS, Counts(steps_delivered=1500, episodes_delivered=5), REMEDY, "500 of 2,048 steps handed over"),
        (
            STEPS,
            Counts(steps_delivered=4000, episodes_delivered=9),
            REMEDY,
            "3,000 of 2,048 steps handed over: an episode that began before others has not ended; " + REMEDY,
        ),
        (EPISODES, Counts(steps_delivered=1500, episodes_delivered=5), REMEDY, "2 of 8 episodes handed over"),
        (STEPS, Counts(steps_delivered=1500), None, "500 of 2,048 steps handed over"),
        (STEPS, Counts(step_calls=0), None, "0 of 2,048 steps handed over: no environment has made a step yet"),
        (STEPS, None, None, "waiting for 2,048 steps"),
    ],
)
def test_the_reason_follows_from_counts(
    activity: LearnerActivity, counts: Counts | None, remedy: str | None, said: str
) -> None:
    assert describe(activity, counts, remedy) == said


@pytest.mark.parametrize(
    ("settings", "demand", "remedy"),
    [
        ({"mode": "freerun"}, Demand(steps=9), "give --max-episode-steps or --segment-steps"),
        ({"mode": "freerun", "deterministic": True}, Demand(steps=9), "give --max-episode-steps"),
        ({"mode": "freerun"}, Demand(episodes=9), "give --max-episode-steps"),
        ({"mode": "freerun", "segment_steps": 8}, Demand(steps=9), None),
        ({"mode": "pipes"}, Demand(steps=9), "give --max-episode-steps"),
        ({"mode": "pipes", "max_episode_steps": 10**6}, Demand(steps=9), "give a smaller --max-episode-steps"),
        ({"mode": "sync"}, Demand(steps=9, whole_episodes=False), None),
        ({"mode": "batch"}, Demand(steps=9), None),
        ({"env": "freerun/RoughDrone-v0", "mode": "sync"}, Demand(steps=9), None),
    ],
)
def test_only_flags_that_the_run_has_are_named(settings: dict[str, Any], demand: Demand, remedy: str | None) -> None:
    assert episode_remedy(make_config({"env": "CartPole-v1", **settings}), demand) == remedy


@pytest.mark.parametrize(("mode", "display"), [("freerun", "lines"), ("sync", "lines"), ("pipes", "rsl-rl")])
def test_episodes_that_never_end_are_reported(mode: str, display: str, tmp_path: Path) -> None:
    endless = ["toy_envs:Endless", "--env-args", "num_steps", "1000000000", "--display", display, "--mode", mode]
    # On a busy machine the first lines may say that no environment has made a step yet.
    reported = re.compile(r"^No update for .*calls of step and reset so far.*\n", re.MULTILINE)
    with OutsideRun(
        [*endless, "--num-workers", "2"], tmp_path / "run", command=["-m", "brisk_freerun", "train"]
    ) as run:
        deadline = time.monotonic() + 90
        while (found := reported.search(run.text)) is None and run.process.poll() is None:
            assert time.monotonic() < deadline, run.text
            time.sleep(0.1)
        assert found is not None, run.text
    line = found.group().rstrip()
    assert "0 of 2,048 steps handed over: no episode has ended yet (" in line
    flags = "--max-episode-steps or --segment-steps" if mode == "freerun" else "--max-episode-steps"
    assert line.endswith(f"calls of step and reset so far); give {flags}")


class Patient(PPO):
    """Its second update lasts until a line says that the learner is updating."""

    Config = PPOConfig

    def update(self, version: int, progress: float) -> Metrics:
        deadline = time.monotonic() + 60
        while version == 1 and "s: updating" not in sys.stderr.getvalue() and time.monotonic() < deadline:  # type: ignore[union-attr]
            time.sleep(0.01)
        return super().update(version, progress)


def test_an_update_that_takes_long_is_called_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
    settings = {"total_steps": 400, "steps_per_update": 200, "num_epochs": 1, "mode": "sequential"}
    freerun.train("CartPole-v1", algo=Patient, run_dir=run_dir, **settings)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("No update for")]
    assert any(line.endswith(": updating") for line in said)
