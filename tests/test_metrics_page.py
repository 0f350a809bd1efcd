"""docs/metrics.md explains every metric that a run records, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import freerun
from freerun.telemetry.time_shares import WORKER_STATES

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
KEY = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
NEEDS_MORE_THAN_A_QUIET_RUN = {*WORKER_STATES.values(), "gpu_percent"}
"""Recorded where a worker was in that state, or a GPU is there."""
TINY: dict[str, Any] = {
    "hidden_sizes": (8,),
    "batch_size": 16,
    "learning_starts": 200,
    "steps_per_update": 100,
    "updates_per_step": 1.0,
}
RUNS: dict[str, dict[str, Any]] = {
    # Long enough for the load of the machine, which is measured once a second.
    "ppo on a slow environment": {
        "env": "freerun/Straggler-v0",
        "mode": "freerun",
        "num_workers": 2,
        "total_steps": 400,
        "segment_steps": 10,
        "steps_per_update": 20,
    },
    "ppo in turns": {"mode": "sync", "num_workers": 2, "steps_per_update": 200},
    "ppo with lag": {"mode": "freerun", "num_workers": 2, "segment_steps": 50, "steps_per_update": 200},
    "ppo with drops": {"mode": "continuous", "num_envs": 2, "num_collectors": 1, "collection_batch_size": 50},
    "ppo that adapts": {"mode": "freerun", "num_workers": 2, "adapt": True, "adapt_max_workers": 3},
    "ppo by torch": {"mode": "pipes", "num_workers": 2, "steps_per_update": 200, "learner": "torch"},
    "sac": {"algo": "sac", "mode": "batch", "num_envs": 2, "num_steps_per_env": 50, "eval_every": 200, **TINY},
    "dqn": {"algo": "dqn", "mode": "sequential", "env": "CartPole-v1", **TINY},
    "mbpo": {
        "algo": "mbpo",
        "mode": "sequential",
        "model_hidden_sizes": (8,),
        "num_models": 2,
        "num_elites": 1,
        "rollouts_per_step": 5.0,
        "model_updates_per_step": 0.5,
        **TINY,
    },
}


def on_the_page() -> set[str]:
    found = KEY.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) == len(set(found)), "each is explained once"
    return set(found)


def without_index(key: str) -> str:
    """Families of keys are explained once."""
    return re.sub(r"^adapted_\w+$", "adapted_NAME", re.sub(r"^lag_share/\d+$", "lag_share/N", key))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    keys: dict[str, set[str]] = {}
    for name, settings in RUNS.items():
        run_dir = tmp_path_factory.mktemp("run") / "run"
        freerun.train(
            **{"env": "Pendulum-v1", "total_steps": 600, "eval_episodes": 1, "quiet": True, **settings}, run_dir=run_dir
        )
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        keys[name] = {without_index(key) for line in lines for key in line}
    return keys


def test_every_metric_that_is_recorded_is_explained(recorded: dict[str, set[str]]) -> None:
    known = on_the_page()
    missing = {name: sorted(keys - known) for name, keys in recorded.items() if keys - known}
    assert not missing


def test_every_metric_that_is_explained_is_recorded(recorded: dict[str, set[str]]) -> None:
    assert on_the_page() - set().union(*recorded.values()) <= NEEDS_MORE_THAN_A_QUIET_RUN
