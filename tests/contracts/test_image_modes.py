"""Images in every mode, alone and beside other numbers: the same weights, bit for bit, and no torch in workers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.algorithms.policies.cnn_actor import CNNActor
from freerun.run.replay_run import replay
from freerun.settings import registry

WHOLE = [name for name, mode in registry.MODES.items() if mode.traits.whole_episodes]
LAGGING = [name for name, mode in registry.MODES.items() if not mode.traits.takes_turns]
KINDS = ("pixels", "sensor", "masked")
SETTINGS: dict[str, Any] = {
    "env": "image_envs:FallingBall",
    "total_episodes": 18,
    "episodes_per_update": 6,
    "minibatch_size": 32,
    "num_epochs": 2,
    "deterministic": True,
    "seed": 5,
    "quiet": True,
}
OF_MODE: dict[str, dict[str, Any]] = {
    "continuous": {"num_collectors": 2, "num_envs": 4, "collection_batch_size": 32},
    "batch": {"num_envs": 4, "num_steps_per_env": 16},
    "freerun": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
    "ray": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def trained(kind: str) -> freerun.Result:
        run_dir = tmp_path_factory.mktemp("images") / "run"
        return freerun.train(**SETTINGS, env_args={"kind": kind}, mode="sequential", run_dir=run_dir)

    return trained


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [mode for mode in WHOLE if mode != "sequential"])
def test_every_mode_ends_at_the_weights_of_sequential_also_when_resumed(
    mode: str, kind: str, references: Any, run_dir: Path
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "total_episodes": 6, "env_args": {"kind": kind}}
    freerun.train(**settings, mode=mode, num_workers=2, run_dir=run_dir)
    result = freerun.resume(run_dir, total_episodes=18)
    expected = references(kind)
    assert isinstance(expected.policy.actor, CNNActor)
    np.testing.assert_array_equal(result.policy.weights, expected.policy.weights)
    assert result.summary["mean_return"] == expected.summary["mean_return"]


@pytest.mark.parametrize("mode", LAGGING)
def test_segments_and_lag_carry_images(mode: str, run_dir: Path) -> None:
    settings = {"steps_per_update": 64, "num_epochs": 1, "quiet": True, "env_args": {"kind": "channels-first"}}
    own = OF_MODE.get(mode, {"num_workers": 2})
    result = freerun.train("image_envs:FallingBall", mode=mode, total_steps=256, run_dir=run_dir, **settings, **own)
    assert result.summary["env_steps"] >= 256
    assert "incidents.jsonl" not in {path.name for path in run_dir.iterdir()}


@pytest.mark.parametrize("mode", ["sync", "pipes", "freerun"])
def test_stacks_of_frames_end_at_the_weights_of_sequential(mode: str, tmp_path: Path) -> None:
    """Slots hold each frame once, and nobody sees a difference."""
    settings = {**SETTINGS, "env": "image_envs:stacked_balls", "total_episodes": 12}
    runs = [freerun.train(**settings, mode=one, run_dir=tmp_path / one) for one in ("sequential", mode)]
    np.testing.assert_array_equal(runs[0].policy.weights, runs[1].policy.weights)


@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_stacks_of_frames_fit_into_segments(envs_per_worker: int, run_dir: Path) -> None:
    settings: dict[str, Any] = {"steps_per_update": 64, "num_epochs": 1, "quiet": True, "total_steps": 256}
    result = freerun.train(
        "image_envs:stacked_balls", envs_per_worker=envs_per_worker, segment_steps=16, run_dir=run_dir, **settings
    )
    assert result.summary["env_steps"] >= 256


def test_a_run_with_lag_is_replayed_bit_for_bit(run_dir: Path) -> None:
    settings = {**SETTINGS, "deterministic": False, "checkpoint_every": "1", "max_lag": 2, "num_workers": 2}
    result = freerun.train(**settings, mode="freerun", run_dir=run_dir)
    assert result.summary["lag_max"] >= 1
    again = replay(run_dir)
    assert again.is_same
    np.testing.assert_array_equal(again.weights, result.policy.weights)


def test_workers_with_a_cnn_do_without_torch(run_dir: Path) -> None:
    freerun.train(**SETTINGS, env_args={"fails_with_torch": True}, mode="freerun", num_workers=1, run_dir=run_dir)
    assert "incidents.jsonl" not in {path.name for path in run_dir.iterdir()}


@pytest.mark.parametrize("kind", ["pixels", "sensor"])
def test_a_cnn_learns_to_catch(kind: str, run_dir: Path) -> None:
    """A paddle that stands still catches a quarter of all balls: a return of -0.5."""
    settings: dict[str, Any] = {"steps_per_update": 512, "minibatch_size": 128, "num_epochs": 4, "learning_rate": 2e-3}
    result = freerun.train(
        "image_envs:FallingBall",
        env_args={"kind": kind},
        mode="sequential",
        total_steps=16_000,
        quiet=True,
        run_dir=run_dir,
        **settings,
    )
    assert np.mean(freerun.evaluate(result.policy, episodes=50).returns) > 0.5
