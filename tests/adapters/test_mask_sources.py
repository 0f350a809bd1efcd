"""Where masks of actions are found, and how they get to the end of an observation."""

from __future__ import annotations

import logging
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import Masked, MaskedByMethod, OneBit

from freerun.adapters import action_masks
from freerun.adapters.action_masks import EnvMasks, MaskSource, find_mask_source
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import EnvFailure, UserError


class Grouped(gymnasium.Env[Any, Any]):
    """A picture for the policy, two numbers for the critic, and a mask."""

    def __init__(self, num_mask: int = 3, keeps_masks: bool = True) -> None:
        parts: dict[str, spaces.Space[Any]] = {
            "policy": spaces.Box(0, 255, (2, 2), np.uint8),
            "critic": spaces.Box(-1, 1, (2,), np.float32),
            "action_mask": spaces.MultiBinary(num_mask),
        }
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Discrete(3)
        self._num_mask, self._keeps_masks = num_mask, keeps_masks

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._observe(True), {}

    def step(self, action: Any) -> Any:
        return self._observe(self._keeps_masks), 0.0, False, False, {}

    def _observe(self, has_mask: bool) -> dict[str, Any]:
        obs: dict[str, Any] = {"policy": np.full((2, 2), 7, np.uint8), "critic": np.array([0.5, -0.5], np.float32)}
        return obs | ({"action_mask": np.array([0, 1, 1, 1][: self._num_mask])} if has_mask else {})


class Untouched(Masked):
    """Fails if it is reset."""

    def reset(self, **options: Any) -> Any:
        raise AssertionError("nobody may reset it")


def test_a_row_has_all_groups_and_the_mask_last() -> None:
    env = GymnasiumFactory(Grouped).make_one()
    spec = env.env_spec
    assert (spec.policy_space.shape, spec.critic_space.shape, spec.has_mask) == ((2, 2), (2,), True)
    assert env.reset(seed=0)[0].tolist() == [7, 7, 7, 7, 0.5, -0.5, 0, 1, 1]
    policy_only = GymnasiumFactory(Grouped, policy_group_only=True).make_one()
    row, _ = policy_only.reset(seed=0)
    assert row.tolist() == [7, 7, 7, 7, 0, 1, 1]
    assert row.dtype == np.uint8, "pictures stay bytes"


def test_who_ignores_masks_sees_them_as_any_other_part() -> None:
    factory = GymnasiumFactory(Masked, {"masks": "observation"}, ignore_masks=True)
    assert (factory.hides_masks, factory.mask_source, factory.spec.has_mask) == (True, None, False)
    assert factory.spec.observation_space.shape == (8,)
    assert GymnasiumFactory(Masked, ignore_masks=True).spec.observation_space.shape == (4,)


@pytest.mark.parametrize(
    ("source", "obs", "info", "expected"),
    [
        (MaskSource.INFO, None, {"action_mask": [1, 0, 1]}, [True, False, True]),
        (MaskSource.OBSERVATION, {"action_mask": np.array([0, 1, 1])}, {}, [False, True, True]),
        (MaskSource.INFO, None, {}, [False] * 3),
        (MaskSource.INFO, None, {"action_mask": [1, 0]}, [False] * 3),
        (MaskSource.METHOD, None, {"action_mask": [1, 0, 1]}, [False] * 3),
    ],
)
def test_the_mask_at_the_end_of_an_episode_may_be_missing(
    source: MaskSource, obs: Any, info: Any, expected: list[bool]
) -> None:
    masks = EnvMasks(source, spaces.Discrete(3))
    assert masks.read(MaskedByMethod(), obs, info, "at the end", has_ended=True).tolist() == expected


def test_the_ways_to_offer_masks_and_their_order() -> None:
    assert find_mask_source(Masked()) is MaskSource.INFO
    assert find_mask_source(Masked("observation")) is MaskSource.OBSERVATION
    wrapped = gymnasium.wrappers.TimeLimit(MaskedByMethod(), 3)
    assert find_mask_source(wrapped) is MaskSource.METHOD
    assert find_mask_source(gymnasium.make("CartPole-v1")) is None
    assert find_mask_source(Masked("nowhere")) is None


def info_from_elsewhere(mask: Any) -> dict[str, Any]:
    """Another function than a method of the environment, as that of a library would be."""
    return {"action_mask": mask}


class MaskedElsewhere(OneBit):
    """Nothing in its own code names a mask."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0], info_from_elsewhere([1, 1])


def test_masks_are_found_wherever_the_info_is_made() -> None:
    assert find_mask_source(MaskedElsewhere()) is MaskSource.INFO


class ExitsInReset(Masked):
    def reset(self, **options: Any) -> Any:
        raise SystemExit(3)


@pytest.mark.parametrize("env", [Untouched, ExitsInReset])
def test_a_reset_that_fails_is_left_to_the_workers(env: type[Masked]) -> None:
    assert GymnasiumFactory(env).mask_source is None


class BrokenMethod(MaskedByMethod):
    def action_masks(self) -> Any:
        raise ValueError("no rule for this board")


def test_what_the_method_raises_is_shown_with_the_seed() -> None:
    env = GymnasiumFactory(BrokenMethod).make_one()
    with pytest.raises(
        EnvFailure, match=r"raised in action_masks, after 0 steps of the episode with seed 4\n"
    ) as found:
        env.reset(seed=4)
    assert "ValueError: no rule for this board" in str(found.value)


@pytest.mark.parametrize(
    ("env_args", "sentence"),
    [
        ({"num_mask": 4}, "after 0 steps of the episode with seed 9: it has 4 numbers, but there are 3 choices"),
        ({"keeps_masks": False}, "after 1 steps of the episode with seed 9: 'action_mask' is missing"),
    ],
)
def test_a_mask_that_cannot_be_read_is_an_error_with_the_seed(env_args: dict[str, Any], sentence: str) -> None:
    env = GymnasiumFactory(Grouped, env_args).make_one()

    def play() -> None:
        env.reset(seed=9)
        env.step(1)

    with pytest.raises(UserError, match=sentence):
        play()


class WaitsToBeNoticed(Masked):
    """Its reset returns when freerun has said that it takes long."""

    noticed = threading.Event()

    def reset(self, **options: Any) -> Any:
        assert self.noticed.wait(60)
        return super().reset(**options)


def test_a_first_reset_that_takes_long_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            WaitsToBeNoticed.noticed.set()

    monkeypatch.setattr(action_masks, "SLOW_RESET_SECONDS", 0.01)
    logging.getLogger("freerun").addHandler(Notice())
    assert find_mask_source(WaitsToBeNoticed("info")) is MaskSource.INFO
    assert "first reset of the environment" in said[0]
