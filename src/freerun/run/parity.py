"""Compares an exported policy with the trained one, on observations that the environment gave."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.adapters.action_masks import MaskReader, MaskSource
from freerun.adapters.env_adapter import EnvAdapter, SerialEnvs
from freerun.collecting.rollouts.evaluation_episodes import play
from freerun.core import HeldOutSeed, Purpose
from freerun.run.export_formats import PolicyOutputs, RunPolicy
from freerun.run.exported_module import MaskedObservation
from freerun.run.trained_policy import TrainedPolicy

TOLERANCE = 1e-5
"""Relative to numbers above 1. Float32 has seven digits, of which the sums of a network lose one."""
FULL_SCALE = 1e6
"""Limits of observations beyond this are no scale to draw from: many environments have the largest float there."""
Observations = list[Any]
"""As the environment gives them; each a `MaskedObservation` where the policy was trained with masks."""


@dataclass(frozen=True)
class Parity:
    """How far an exported policy is from the trained one."""

    num_observations: int
    source: str
    """Where the observations come from."""
    largest_difference: float
    """The largest absolute difference of an action; of a logit, for discrete actions."""
    num_other_actions: int
    """How many discrete actions differ, where two choices are equally good within rounding."""
    holds: bool

    def __str__(self) -> str:
        others = f", {self.num_other_actions} other choices" if self.num_other_actions else ""
        return (
            f"parity: largest absolute difference {self.largest_difference:.2g}{others}, "
            f"over {self.num_observations:,} observations {self.source}"
        )


def compare(trained: RunPolicy, exported: RunPolicy, observations: Observations, source: str) -> Parity:
    """Run both policies on the same observations."""
    ours, theirs = (_one_by_one(run, observations) for run in (trained, exported))
    is_discrete = ours.logits is not None
    expected, found = (outputs.logits if is_discrete else outputs.action for outputs in (ours, theirs))
    assert expected is not None
    assert found is not None
    difference = np.abs(np.asarray(found, np.float64) - expected)
    holds = bool((difference <= TOLERANCE * np.maximum(1.0, np.abs(expected))).all())  # False for NaN
    num_others = int((ours.action != theirs.action).sum()) if is_discrete else 0
    return Parity(len(observations), source, float(difference.max()), num_others, holds)


def _one_by_one(run: RunPolicy, observations: Observations) -> PolicyOutputs:
    """Run a policy as a robot does. A network of the user's own may depend on what shares a batch with it."""
    outputs = [run([obs]) for obs in observations]
    actions = np.concatenate([output.action for output in outputs])
    logits = [output.logits for output in outputs if output.logits is not None]
    return PolicyOutputs(actions, np.concatenate(logits) if logits else None)


# ---------------------------------------------------------------------------------------------- observations


class _ObservationRecorder(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Keeps every observation as the environment gave it."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        self.found: Observations = []

    def observation(self, observation: Any) -> Any:
        self.found.append(copy.deepcopy(observation))  # some environments give the same array again and again
        return observation


def record(
    env: gymnasium.Env[Any, Any], policy: TrainedPolicy, seed: int, number: int, mask_source: MaskSource | None
) -> Observations:
    """Play episodes that no training has seen, and return their observations. The environment is closed."""
    # The time limit is for environments whose episodes never end.
    recorder = _ObservationRecorder(gymnasium.wrappers.TimeLimit(env, number))
    envs = SerialEnvs([EnvAdapter(recorder, policy_group_only=True, mask_source=mask_source)])
    found: Observations = []
    try:
        for segment in play(envs, policy.actor, HeldOutSeed(seed, Purpose.EVALUATION), number):
            played, recorder.found = [policy.seen_part(obs) for obs in recorder.found], []
            if policy.has_mask:
                # Rows end with the masks. The last observation is left out: no action follows, so it may have none.
                masks = segment.obs[:, 0, -policy.actor.head_size :] != 0
                played = [MaskedObservation(*pair) for pair in zip(played, masks, strict=False)]
            found += played
            if len(found) >= number:
                break
    finally:
        envs.close()
    return found[:number]


def draw(policy: TrainedPolicy, seed: int, number: int) -> Observations:
    """Draw observations where there is no environment to play: as the normaliser has seen them, or from their space."""
    rng = np.random.default_rng(seed)
    found = _draw_observations(policy, rng, number)
    if not policy.has_mask:
        return found
    masks = rng.random((number, policy.actor.head_size)) < 0.5
    masks[:, MaskReader(policy.action_space).first_choices] = True  # each must allow something
    return [MaskedObservation(*pair) for pair in zip(found, masks, strict=True)]


def _draw_observations(policy: TrainedPolicy, rng: np.random.Generator, number: int) -> Observations:
    space, arrays = policy.observation_space, policy.actor.arrays
    if "obs_mean" in arrays and isinstance(space, spaces.Box):
        # obs_scale is one over the standard deviation.
        rows = arrays["obs_mean"] + rng.standard_normal((number, len(arrays["obs_mean"]))) / arrays["obs_scale"]
        return list(rows.reshape(number, *space.shape).astype(space.dtype))
    space = copy.deepcopy(space)
    space.seed(int(rng.integers(2**31)))
    return [_draw(space, rng) for _ in range(number)]


def _draw(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _draw(part, rng) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_draw(part, rng) for part in space)
    if not isinstance(space, spaces.Box) or (np.abs([space.low, space.high]) < FULL_SCALE).all():
        return space.sample()
    return np.clip(rng.standard_normal(space.shape), space.low, space.high).astype(space.dtype)
