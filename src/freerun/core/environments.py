"""Environments as freerun sees them: one by one, in a batch of arrays, or as a batch of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core.accounting import Tracks
from freerun.core.data import Array, Metrics

if TYPE_CHECKING:  # workers never import torch
    import torch
    from torch import Tensor


ActionSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.Box


class EnvSpaces(NamedTuple):
    """The spaces of an environment as its author wrote them: what a deployed policy takes and returns."""

    observation: spaces.Space[Any]
    action: spaces.Space[Any]


class ImagePart(NamedTuple):
    """An image within the row of numbers that a policy sees."""

    start: int
    """Where its first pixel stands in the row."""
    shape: tuple[int, int, int]
    """As the environment has it: channels first or last."""
    highest: float = 255.0
    """The brightest value that a pixel can take. Networks divide by it."""

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @classmethod
    def read(cls, fields: Sequence[Any]) -> ImagePart:
        """An image from JSON, where tuples have become lists."""
        start, (first, second, third), highest = fields
        return cls(int(start), (int(first), int(second), int(third)), float(highest))


class ObsGroups(NamedTuple):
    """The parts of an observation that is one row of numbers. They stand in it in this order."""

    policy: spaces.Box
    """What the policy sees."""
    critic: spaces.Box | None = None
    """What the value function sees instead: an asymmetric critic (Pinto et al. 2018). None if it sees the same."""
    mask: spaces.Box | None = None
    """Which choices of a discrete action are allowed now: 1 for each that is, 0 for each other one. The choices of
    several discrete actions stand one after another. No network sees it. None if every choice is always allowed."""

    @property
    def present(self) -> tuple[spaces.Box, ...]:
        return tuple(group for group in self if group is not None)

    def row_space(self) -> spaces.Box:
        """The space of whole rows."""
        low, high = (np.concatenate([getattr(group, end).ravel() for group in self.present]) for end in ("low", "high"))
        return spaces.Box(low, high, dtype=low.dtype.type)


class BatchReset(Enum):
    """Who starts the next episode of an environment that one call steps together with others."""

    ON_CALL = "each is reset when it is asked to, from the seed of its episode"
    SAME_STEP = "the step that ends an episode starts the next one"
    NEXT_STEP = "the step after the one that ends an episode is a reset, and no step"

    @property
    def seeds_episodes(self) -> bool:
        """True if an episode's number decides its randomness, and if an environment can wait for its next episode."""
        return self is BatchReset.ON_CALL


@dataclass(frozen=True)
class EnvSpec:
    """What an algorithm must know about an environment."""

    observation_space: spaces.Box
    action_space: ActionSpace
    reports_final_obs: bool = True
    """False if the environment resets itself and hides the last observation of an episode."""
    max_episode_steps: int | None = None
    """The time limit: no episode has more steps. None if there is no limit, or if it is not known."""
    obs_groups: ObsGroups | None = None
    """The groups that an observation consists of. None if policy and value function see all of it."""
    images: tuple[ImagePart, ...] = ()
    """The images within what the policy sees, in their order. A network that knows of none sees plain numbers."""
    batch_reset: BatchReset = BatchReset.ON_CALL
    """Where one call steps several of these environments: who starts their next episodes."""
    num_frames: int = 1
    """If more than 1, observations are stacks of frames, [frames, ...]: those of the last steps, the newest last, and
    at the start of an episode its first frame again and again. So consecutive observations share all but one."""

    @classmethod
    def of_groups(cls, obs_groups: ObsGroups, action_space: ActionSpace, reports_final_obs: bool) -> EnvSpec:
        """The spec of an environment whose observations are rows of several groups."""
        return cls(obs_groups.row_space(), action_space, reports_final_obs, obs_groups=obs_groups)

    @property
    def policy_space(self) -> spaces.Box:
        """What the policy sees of an observation."""
        return self.observation_space if self.obs_groups is None else self.obs_groups.policy

    @property
    def critic_space(self) -> spaces.Box:
        """What the value function sees of an observation."""
        return self.policy_space if self.obs_groups is None else self.obs_groups.critic or self.policy_space

    @property
    def has_critic_group(self) -> bool:
        """True if the value function sees another part of an observation than the policy."""
        return self.obs_groups is not None and self.obs_groups.critic is not None

    @property
    def has_mask(self) -> bool:
        """True if observations end with the mask of the actions that are allowed."""
        return self.obs_groups is not None and self.obs_groups.mask is not None

    def cut_down(self, keeps_critic: bool, keeps_mask: bool) -> EnvSpec:
        """The same environment for an algorithm that has no use for all groups."""
        if self.obs_groups is None:
            return self
        policy, critic, mask = self.obs_groups
        groups = ObsGroups(policy, critic if keeps_critic else None, mask if keeps_mask else None)
        is_row = len(groups.present) > 1
        space = groups.row_space() if is_row else policy
        return replace(self, observation_space=space, obs_groups=groups if is_row else None)

    @property
    def action_shape(self) -> tuple[int, ...]:
        return self.action_space.shape or ()


def mask_space(action_space: Any) -> spaces.Box:
    """The space of masks for discrete actions. Of bytes, so that a row takes on the type of the other groups."""
    sizes = [action_space.n] if isinstance(action_space, spaces.Discrete) else action_space.nvec
    return spaces.Box(0, 1, (int(np.sum(sizes)),), np.uint8)


class StepResult(NamedTuple):
    """One step of B environments. The arrays belong to the environment, and the next step overwrites them."""

    obs: Array
    """The observations to act on next. If an environment resets itself, this is the first one of the next episode."""
    final_obs: Array
    """The observations after the step. Where an episode has ended, this is its last one."""
    reward: Array
    terminated: Array | Sequence[bool]
    truncated: Array | Sequence[bool]


class VectorEnv(Protocol):
    """B environments that are stepped together. An environment whose episode has ended rests until it is reset."""

    spec: EnvSpec
    num_envs: int

    def reset(self, seeds: Sequence[int | None]) -> Array:
        """Start a new episode in each environment that gets a seed, and return the observations of all."""
        ...

    def step(self, action: Array) -> StepResult: ...

    def close(self) -> None: ...


class EnvFactory(Protocol):
    """Builds environments. It is sent to the workers, which build their own."""

    @property
    def spec(self) -> EnvSpec: ...

    def make_one(self) -> gymnasium.Env[Any, Any]:
        """Build one environment with the spaces of `spec`."""
        ...

    def make(self, num_envs: int) -> VectorEnv:
        """Build environments that are stepped one after another in this process."""
        ...

    def make_parallel(self, num_envs: int, tracks: Tracks, step_timeout: float) -> VectorEnv:
        """Build environments in a process each that are stepped together.

        Each notes on its own track when it is busy. A step that takes longer than `step_timeout` seconds is a failure.
        """
        ...


class TensorStep(NamedTuple):
    """One step of N environments. The tensors belong to the environment, and the next step overwrites them."""

    obs: Tensor
    final_obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor


class TensorEnv(Protocol):
    """N environments that are stepped as one batch of tensors. The step that ends an episode starts the next one."""

    spec: EnvSpec
    num_envs: int
    device: torch.device
    is_capturable: bool
    """True if a step can be recorded in a CUDA graph: it never reads from the device, and writes all state in place."""

    def reset(self) -> Tensor:
        """Start a new episode in all environments, and return the first observations."""
        ...

    def step(self, action: Tensor) -> TensorStep: ...

    def metrics(self) -> Metrics:
        """Return what the simulator has logged about itself since the last call."""
        ...

    def close(self) -> None: ...
