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
from freerun.core import Array, HeldOutSeed, Purpose
from freerun.run.export_formats import PolicyOutputs, RunPolicy
from freerun.run.exported_module import ExtendedObservation
from freerun.run.trained_policy import TrainedPolicy

TOLERANCE = 1e-5
"""Relative to numbers above 1. Float32 has seven digits, of which the sums of a network lose one."""
FULL_SCALE = 1e6
"""Limits of observations beyond this are no scale to draw from: many environments have the largest float there."""
Observations = list[Any]
"""As the environment gives them; each an `ExtendedObservation` where the policy needs a mask or a memory."""


@dataclass(frozen=True)
class Parity:
    """How far an exported policy is from the trained one."""

    num_observations: int
    source: str
    """Where the observations come from."""
    largest_difference: float
    """The largest absolute difference of an action; of a logit, for discrete actions; or of what is remembered."""
    num_other_actions: int
    """How many discrete actions differ, where two choices are equally good within rounding."""
    holds: bool

    def __str__(self) -> str:
        others = f", {self.num_other_actions} other choices" if self.num_other_actions else ""
        return (
            f"parity: largest absolute difference {self.largest_difference:.2g}{others}, "
            f"over {self.num_observations:,} observations {self.source}"
        )


def compare(
    trained: RunPolicy, exported: RunPolicy, observations: Observations, source: str, action_space: Any
) -> Parity:
    """Run both policies on the same observations."""
    ours, theirs = (_one_by_one(run, observations) for run in (trained, exported))
    expected, found = (_numbers(outputs) for outputs in (ours, theirs))
    difference = np.abs(found - expected)
    holds = bool((difference <= TOLERANCE * np.maximum(1.0, np.abs(expected))).all())  # False for NaN
    num_others = 0
    if ours.logits is not None:
        num_others = int((ours.action != theirs.action).sum())
        holds = holds and _are_best(theirs.action, ours.logits, action_space)
    return Parity(len(observations), source, float(difference.max()), num_others, holds)


def _are_best(actions: Array, logits: Array, action_space: Any) -> bool:
    """True if no choice has a larger logit than the chosen ones, within rounding: equal logits alone prove nothing
    about the actions, which the exported policy takes from them by itself."""
    first = MaskReader(action_space).first_choices
    choices = (actions - action_space.start).reshape(len(actions), -1)
    sizes = np.diff([*first, logits.shape[1]])
    if not ((choices >= 0) & (choices < sizes)).all():
        return False
    best = np.maximum.reduceat(logits, first, axis=1)
    chosen = np.take_along_axis(logits, first + choices, axis=1)
    # Both numbers that are compared may be off by the tolerance.
    return bool((best - chosen <= 2 * TOLERANCE * np.maximum(1.0, np.abs(best))).all())


def _numbers(outputs: PolicyOutputs) -> Array:
    """Return what two policies may differ in by rounding, as one row per observation."""
    first = outputs.action if outputs.logits is None else outputs.logits
    parts = [first] if outputs.next_memory is None else [first, outputs.next_memory]
    return np.concatenate([np.asarray(part, np.float64).reshape(len(part), -1) for part in parts], axis=1)


def _one_by_one(run: RunPolicy, observations: Observations) -> PolicyOutputs:
    """Run a policy as a robot does. A network of the user's own may depend on what shares a batch with it."""
    action, *others = zip(*(run([obs]) for obs in observations), strict=True)
    joined = (None if column[0] is None else np.concatenate(column) for column in others)
    return PolicyOutputs(np.concatenate(action), *joined)


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
                played = [ExtendedObservation(*pair) for pair in zip(played, masks, strict=False)]
            found += _with_memories(policy, played) if policy.memory_size else played
            if len(found) >= number:
                break
    finally:
        envs.close()
    return found[:number]


def _with_memories(policy: TrainedPolicy, episode: Observations) -> Observations:
    """Return the observations of an episode with what the policy remembers before each."""
    memory, found = policy.new_memory(), []
    for one in episode:
        extended = one if policy.has_mask else ExtendedObservation(one)
        found.append(extended._replace(memory=memory.copy()))
        policy.predict(extended.observation, action_mask=extended.action_mask, memory=memory)
    return found


def draw(policy: TrainedPolicy, seed: int, number: int) -> Observations:
    """Draw observations where there is no environment to play: as the normaliser has seen them, or from their space."""
    rng = np.random.default_rng(seed)
    found = _draw_observations(policy, rng, number)
    if policy.has_mask:
        masks = rng.random((number, policy.actor.head_size)) < 0.5
        masks[:, MaskReader(policy.action_space).first_choices] = True  # each must allow something
        found = [ExtendedObservation(*pair) for pair in zip(found, masks, strict=True)]
    return _with_memories(policy, found) if policy.memory_size else found


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
