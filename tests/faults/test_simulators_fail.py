"""Environments that are tensors: a simulator that hangs, or returns what is not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import preloaded_python
import pytest
import torch

import freerun
from freerun.adapters import catalog
from freerun.collecting.tensors.checked_rollout import find_not_finite
from freerun.core import NotFinite, TensorSegment, WorkerHung
from freerun.persistence import checkpoint
from freerun.settings import registry

MODES = [name for name, entry in registry.MODES.items() if entry.traits.tensors is not None]
SMALL: dict[str, Any] = {"hidden_sizes": (8,), "quiet": True, "num_envs": 6, "num_epochs": 1}


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the toy environment."""
    monkeypatch.setitem(catalog.TENSOR_ENVS, "toy/Counting-v0", "toy_tensors:build")
    return "toy/Counting-v0"


def options(mode: str, how: str, **more: Any) -> dict[str, Any]:
    size = {"collection_batch_size": 30} if mode == "continuous" else {"num_steps_per_env": 5}
    return {**SMALL, **size, "mode": mode, "env_args": {"fail_after": 102, "how": how}, "total_steps": 2000, **more}


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------- hangs


@pytest.mark.parametrize("mode", MODES)
def test_a_simulator_that_hangs_ends_the_run_with_its_stack_and_a_checkpoint(
    mode: str, counting: str, run_dir: Path
) -> None:
    with pytest.raises(WorkerHung, match=r"no step for .* \(--step-timeout 1\); its stack:[\s\S]*time\.sleep\(1000\)"):
        freerun.train(counting, **options(mode, "sleep", step_timeout=1.0), run_dir=run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert summary["incidents"] == {"hang": 1}
    assert "in _fail" in incidents(run_dir)[0]["text"]
    assert checkpoint.newest(run_dir).state["update"] == summary["updates"] > 0


STUCK = """
import freerun, toy_tensors
env = toy_tensors.Counting(6, "cpu", 102, True, "lock")
freerun.train(env, mode={mode!r}, num_steps_per_env=5, hidden_sizes=(8,), num_epochs=1, total_steps=2000,
              step_timeout=1.0, quiet=True, run_dir={run_dir!r})
"""


@pytest.mark.parametrize("mode", ["sync", "batch"])
def test_a_simulator_that_is_stuck_outside_of_python_ends_the_run_too(
    mode: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    script = f"from freerun.collecting.tensors import simulator_watch\nsimulator_watch.GRACE_SECONDS = -4.0\n{STUCK}"
    done = preloaded_python.run("-c", script.format(mode=mode, run_dir=str(run_dir)))
    assert done.returncode == 1, done.stderr
    assert "c.pthread_mutex_lock(mutex)" in done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert checkpoint.newest(run_dir).state["update"] == summary["updates"] > 0


# ---------------------------------------------------------------------------------------------- NaN and infinity


def segment(**bad: tuple[int, ...]) -> TensorSegment:
    """Five steps of three environments, with episodes of 2, 3 and 4 steps. `bad` says what is infinite where."""
    zeros, index = torch.zeros(5, 3), torch.arange(5)[:, None]
    lengths = torch.tensor([2, 3, 4])
    made = TensorSegment(
        obs=torch.zeros(5, 3, 2),
        action=torch.zeros(5, 3, dtype=torch.int64),
        log_prob=zeros.clone(),
        reward=zeros.clone(),
        terminated=index % lengths == lengths - 1,
        truncated=zeros.bool(),
        next_obs=torch.zeros(5, 3, 2),
        episode_return=zeros,
        episode_length=index % lengths + 1,
        version=7,
        seconds=0.0,
    )
    for name, place in bad.items():
        getattr(made, name)[place] = torch.inf
    return made


@pytest.mark.parametrize(
    ("bad", "what", "step", "num_kept"),
    [
        ({"obs": (0, 1, 0)}, "observation that is not finite, at step 0 of an episode in environment 1 of 3", 0, 1),
        ({"reward": (3, 0)}, "reward that is not finite, at step 1 of an episode in environment 0", 1, 2),
        ({"next_obs": (4, 2, 1)}, "observation that is not finite, at step 1 of an episode in environment 2", 1, 1),
        ({"log_prob": (2, 1), "reward": (2, 0)}, "log-probability that is not finite, at step 2 of", 2, 3),
    ],
)
def test_the_first_number_is_named_and_the_steps_of_its_episode_are_kept(
    bad: dict[str, tuple[int, ...]], what: str, step: int, num_kept: int
) -> None:
    assert find_not_finite(segment()) is None
    failure = find_not_finite(segment(**bad))
    assert failure is not None
    assert what in str(failure)
    assert failure.step == step
    assert failure.evidence is not None
    assert failure.evidence.reward.shape == (num_kept, 1)


@pytest.mark.parametrize("mode", MODES)
def test_with_on_nan_continue_the_segment_is_left_out_and_all_episodes_begin_anew(
    mode: str, counting: str, run_dir: Path
) -> None:
    result = freerun.train(counting, **options(mode, "nan once", on_nan="continue"), run_dir=run_dir)
    summary = result.summary
    assert summary["outcome"] == "finished"
    assert summary["segments_rejected"] == 1
    assert summary["incidents"] == {"not-finite": 1}
    assert np.isfinite(result.policy.weights).all()
    assert np.isfinite(summary["mean_return"])
    assert summary["dropped_steps"] >= 30
    ledger = summary["ledger"]
    assert ledger["started"] == ledger["trained"] + ledger["dropped"] + ledger["in_flight"]
    incident = incidents(run_dir)[0]
    assert "a reward that is not finite, at step" in incident["text"]
    with np.load(run_dir / incident["kept_in"], allow_pickle=False) as kept:
        assert np.isnan(kept["reward"][-1])


@pytest.mark.parametrize("mode", MODES)
def test_with_on_nan_stop_the_run_ends(mode: str, counting: str, run_dir: Path) -> None:
    with pytest.raises(NotFinite, match="a reward that is not finite, at step"):
        freerun.train(counting, **options(mode, "nan once", on_nan="stop"), run_dir=run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"


def test_a_simulator_that_never_recovers_ends_the_run_all_the_same(counting: str, run_dir: Path) -> None:
    with pytest.raises(NotFinite, match=r"8 times in a row[\s\S]*an observation that is not finite"):
        freerun.train(counting, **options("batch", "nan always", on_nan="continue"), run_dir=run_dir)
    assert checkpoint.newest(run_dir).state["update"] > 0
