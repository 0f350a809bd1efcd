"""Metrics have the names, and the console the block, that users of RSL-RL know."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import freerun
from freerun.telemetry.metric_tags import rsl_rl_tags
from freerun.telemetry.rsl_rl_console import block

RECORD = {
    "update": 5.0,
    "progress": 0.25,
    "wall_seconds": 20.0,
    "interval_seconds": 4.0,
    "steps_per_second": 1234.4,
    "learner_waiting_share": 0.75,
    "learner_updating_share": 0.2,
    "return_mean": 3.5,
    "length_mean": 99.0,
    "policy_loss": -0.01,
    "value_loss": 0.5,
    "entropy": 2.0,
    "learning_rate": 1e-3,
    "clip_fraction": 0.1,
    "Metrics/success_rate": 0.5,
    "lag_share/0": 1.0,
}


def test_tags() -> None:
    assert rsl_rl_tags(RECORD) == {
        "Perf/total_fps": 1234.4,
        "Perf/collection_time": 3.0,
        "Perf/learning_time": pytest.approx(0.8),
        "Train/mean_reward": 3.5,
        "Train/mean_episode_length": 99.0,
        "Loss/surrogate": -0.01,
        "Loss/value": 0.5,
        "Loss/entropy": 2.0,
        "Loss/learning_rate": 1e-3,
        "Metrics/success_rate": 0.5,
        "lag_share/0": 1.0,
        **{
            f"Freerun/{name}": RECORD[name]
            for name in (
                "update",
                "progress",
                "wall_seconds",
                "interval_seconds",
                "learner_waiting_share",
                "learner_updating_share",
                "clip_fraction",
            )
        },
    }


def rows(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ +(.+?): (.+)$", text, re.MULTILINE))


def test_the_block() -> None:
    text = block(61_440, RECORD)
    assert "Learning iteration 5/20" in text
    assert rows(text) == {
        "Total steps": "61440",
        "Steps per second": "1234",
        "Collection time": "3.000s",
        "Learning time": "0.800s",
        "Mean surrogate loss": "-0.0100",
        "Mean value loss": "0.5000",
        "Mean entropy loss": "2.0000",
        "Mean reward": "3.50",
        "Mean episode length": "99.00",
        "Metrics/success_rate": "0.5000",
        "Iteration time": "4.00s",
        "Time elapsed": "0:00:20",
        "ETA": "0:01:00",
    }


def test_before_the_first_episode_has_ended() -> None:
    text = block(100, {**RECORD, "return_mean": float("nan"), "length_mean": float("nan")})
    assert "Mean reward" not in text
    assert "nan" not in text


def test_a_real_run_prints_a_block_per_update(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freerun.train(
        "CartPole-v1", mode="sequential", total_steps=1500, steps_per_update=500, display="rsl-rl", run_dir=run_dir
    )
    blocks = capsys.readouterr().out.split("#" * 80)[1:]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(blocks) == len(records)
    for text, record in zip(blocks, records, strict=True):
        shown = rows(text)
        assert shown["Total steps"] == str(record["step"])
        assert shown["Mean reward"] == f"{record['return_mean']:.2f}"
        seconds = sum(float(shown[name].rstrip("s")) for name in ("Collection time", "Learning time"))
        assert seconds <= record["interval_seconds"] + 0.002
