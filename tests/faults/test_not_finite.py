"""NaN and infinity are found where they appear, named, kept aside; and the run stops or goes on, as it was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.core import NotFinite, UserError, episode_seed

SETTINGS: dict[str, Any] = {"num_epochs": 2, "quiet": True, "seed": 4}
MODES = ["sequential", "sync", "pipes", "executor", "freerun", "ray"]


def train(mode: str, how: str, run_dir: Path, **settings: Any) -> freerun.Result:
    workers = {} if mode == "sequential" else {"num_workers": 2}
    settings = {"episodes_per_update": 10, "total_episodes": 60, **SETTINGS, **workers, **settings}
    return freerun.train("toy_envs:Faulty", mode=mode, env_args={"how": how, "share": 0.1}, run_dir=run_dir, **settings)


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_to_continue_leaves_the_episode_out_and_keeps_it_aside(mode: str, run_dir: Path) -> None:
    result = train(mode, "nan", run_dir, on_nan="continue", deterministic=True)
    ledger = result.summary["ledger"]
    assert result.summary["outcome"] == "finished"
    assert ledger["dropped"] == result.summary["segments_rejected"] >= 1
    assert ledger["trained"] >= 60
    assert ledger["started"] == ledger["trained"] + ledger["dropped"] + ledger["in_flight"]
    assert np.isfinite(result.policy.weights).all()
    for incident in incidents(run_dir):
        assert incident["kind"] == "not-finite"
        assert incident["seed"] == episode_seed(4, incident["episode"])
        assert f"at step 4 of episode {incident['episode']} (seed {incident['seed']})" in incident["text"]
        with np.load(run_dir / incident["kept_in"], allow_pickle=False) as kept:
            assert kept["action"].shape[0] == 4
            assert np.isnan(kept["next_obs"][3]).any()
            assert not np.isnan(kept["next_obs"][:3]).any()
        about = json.loads((run_dir / incident["kept_in"]).with_suffix(".json").read_text())
        assert about["seed"] == incident["seed"]


def test_every_mode_leaves_out_the_same_episodes(tmp_path: Path) -> None:
    weights = [
        train(mode, "nan", tmp_path / mode, on_nan="continue", deterministic=True).policy.weights
        for mode in ("sequential", "freerun")
    ]
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("mode", ["sequential", "freerun"])
def test_a_run_stops_by_default(mode: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=r"reward that is not finite at step 3 of episode \d+"):
        train(mode, "inf", run_dir)
    assert list((run_dir / "bad").glob("episode-*.npz"))


def test_steps_are_counted_from_the_start_of_the_episode_also_where_segments_cut_it(run_dir: Path) -> None:
    with pytest.raises(NotFinite, match="at step 4 of episode"):
        train("freerun", "nan", run_dir, episodes_per_update=None, segment_steps=3, steps_per_update=12)


@pytest.mark.parametrize("mode", ["continuous", "batch"])
def test_modes_that_never_stop_can_be_told_to(mode: str, run_dir: Path) -> None:
    few: dict[str, Any] = {"num_envs": 2, "total_episodes": 100}
    if mode == "continuous":
        few |= {"num_collectors": 2, "collection_batch_size": 8, "collector_kind": "process"}
    with pytest.raises(NotFinite, match="at step 4 of episode"):
        freerun.train(
            "toy_envs:Faulty", mode=mode, env_args={"how": "nan"}, on_nan="stop", run_dir=run_dir, **few, **SETTINGS
        )


@pytest.mark.parametrize("on_nan", ["continue", "stop"])
@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_losses_that_overflow_change_no_weight_and_name_the_step(algo: str, on_nan: str, run_dir: Path) -> None:
    settings: dict[str, Any] = (
        {"num_epochs": 1, "episodes_per_update": 4, "normalize_reward": False}  # which would scale it down
        if algo == "ppo"
        else {"learning_starts": 32, "batch_size": 32}
    )
    arguments: dict[str, Any] = {
        "env_args": {"actions": "discrete" if algo == "ppo" else "box"},
        "mode": "sequential",
        "algo": algo,
        "total_steps": 400,
        "on_nan": on_nan,
        "quiet": True,
        "run_dir": run_dir,
    }
    if on_nan == "stop":
        with pytest.raises(
            NotFinite, match=r"not finite; no weight[\s\S]*a reward of 3e\+38, at step 2 of episode \d+"
        ):
            freerun.train("toy_envs:Overflows", **arguments, **settings)
    else:
        result = freerun.train("toy_envs:Overflows", **arguments, **settings)
        assert np.isfinite(result.policy.weights).all()
        assert result.summary["incidents"]["not-finite"] >= 1
    first = incidents(run_dir)[0]
    assert first["worker"] == -1
    assert (run_dir / first["kept_in"]).exists()
