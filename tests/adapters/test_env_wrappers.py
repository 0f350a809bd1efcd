"""Wrappers that users choose by name, and stacks of frames that are views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation
from image_envs import FallingBall

import freerun
from freerun.adapters.env_adapter import EnvAdapter
from freerun.adapters.env_wrappers import ATARI, BLOCK_FRAMES, FrameStack
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import ImagePart, UserError

needs_atari = pytest.mark.skipif(not ATARI.is_installed, reason="needs freerun[atari]")


class Counting(gymnasium.Env[Any, Any]):
    """Frames that hold the number of their step."""

    observation_space = gymnasium.spaces.Box(0, 255, (2, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        return np.full((2, 3), 0, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return np.full((2, 3), self._step % 256, np.uint8), 1.0, False, False, {}


@pytest.mark.parametrize("num_frames", [1, 2, 4])
def test_a_stack_is_that_of_gymnasium_and_what_was_returned_stays(num_frames: int) -> None:
    ours, theirs = FrameStack(Counting(), num_frames), FrameStackObservation(Counting(), num_frames)
    assert ours.observation_space == theirs.observation_space
    found, expected = [], []
    for length in (3, 2 * BLOCK_FRAMES + 5):
        found.append(ours.reset()[0])
        expected.append(theirs.reset()[0].copy())
        for _ in range(length):
            found.append(ours.step(0)[0])
            expected.append(theirs.step(0)[0].copy())
    # All are compared at the end: a view that was overwritten meanwhile would show.
    np.testing.assert_array_equal(np.stack(found), np.stack(expected))


def test_each_frame_is_written_once() -> None:
    env = FrameStack(Counting(), 4)
    env.reset()
    first, second = env.step(0)[0], env.step(0)[0]
    assert np.shares_memory(first[1:], second[:3])


def test_only_stacks_that_nobody_has_changed_are_said_to_be_stacks() -> None:
    stacked = FrameStack(Counting(), 4)
    assert EnvAdapter(stacked).env_spec.num_frames == 4
    assert EnvAdapter(gymnasium.wrappers.TimeLimit(stacked, 10)).env_spec.num_frames == 4
    inverted = gymnasium.wrappers.TransformObservation(stacked, lambda obs: 255 - obs, stacked.observation_space)
    assert EnvAdapter(inverted).env_spec.num_frames == 1
    assert EnvAdapter(Counting()).env_spec.num_frames == 1


def test_dictionaries_are_no_frames() -> None:
    with pytest.raises(UserError, match="frames can be stacked where observations are a Box"):
        FrameStack(FallingBall("sensor"), 4)


def test_other_names_are_refused() -> None:
    with pytest.raises(UserError, match="there is no --wrap maze: choose atari"):
        GymnasiumFactory("CartPole-v1", wrap="maze")


@pytest.mark.skipif(ATARI.is_installed, reason="freerun[atari] is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install 'freerun\[atari\]'"):
        GymnasiumFactory("ALE/Pong-v5", wrap="atari")


@needs_atari
def test_atari_games_are_grey_and_small_and_stacked() -> None:
    factory = GymnasiumFactory("ALE/Pong-v5", wrap="atari")
    assert factory.spec.images == (ImagePart(0, (4, 84, 84), 255.0),)
    env = factory.make_one()
    first, _ = env.reset(seed=3)
    again, _ = factory.make_one().reset(seed=3)
    np.testing.assert_array_equal(first, again)
    assert first.dtype == np.uint8
    assert env.step(np.int64(0))[0].shape == (4, 84, 84)


@needs_atari
def test_other_environments_are_no_atari_games() -> None:
    with pytest.raises(UserError, match="--wrap atari is for Atari games such as ALE/Pong-v5: "):
        GymnasiumFactory("CartPole-v1", wrap="atari")


@needs_atari
def test_atari_is_the_same_in_workers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"wrap": "atari", "total_episodes": 2, "episodes_per_update": 1, "deterministic": True}
    settings |= {"max_episode_steps": 40, "num_epochs": 1, "quiet": True}
    game, modes = "ALE/Pong-v5", ("sequential", "freerun")
    runs = [freerun.train(game, mode=mode, run_dir=tmp_path / mode, **settings) for mode in modes]
    np.testing.assert_array_equal(runs[0].policy.weights, runs[1].policy.weights)
    assert len(freerun.evaluate(tmp_path / "freerun", episodes=1).returns) == 1
