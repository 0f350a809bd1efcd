"""What steps: environments one by one, in a batch of arrays, or as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import gymnasium
from gymnasium import spaces

from freerun.core.books import Tracks
from freerun.core.data import Array, Metrics

if TYPE_CHECKING:  # workers do without torch
    import torch
    from torch import Tensor


ActionSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.Box


@dataclass(frozen=True)
class EnvSpec:
    """What an algorithm must know of an environment."""

    observation_space: spaces.Box
    action_space: ActionSpace
    reports_final_obs: bool = True
    """False where an environment resets itself and hides the last observation of an episode."""

    @property
    def action_shape(self) -> tuple[int, ...]:
        return self.action_space.shape or ()


class StepResult(NamedTuple):
    """One step of B environments. The arrays belong to the environment and are overwritten by the next step."""

    obs: Array
    """What to act on next: where an environment resets itself, the first observation of the next episode."""
    final_obs: Array
    """The successor of the step: where an episode ended, its last observation."""
    reward: Array
    terminated: Array | Sequence[bool]
    truncated: Array | Sequence[bool]


class VectorEnv(Protocol):
    """B environments stepped together. One whose episode has ended rests until it is reset."""

    spec: EnvSpec
    num_envs: int

    def reset(self, seeds: Sequence[int | None]) -> Array:
        """Start a new episode where a seed is given, leave the others alone; return all observations."""
        ...

    def step(self, action: Array) -> StepResult: ...

    def close(self) -> None: ...


class EnvFactory(Protocol):
    """Builds environments where they are needed; travels to the workers."""

    @property
    def spec(self) -> EnvSpec: ...

    def make_lane(self) -> gymnasium.Env[Any, Any]:
        """One environment with the spaces of `spec`."""
        ...

    def make(self, num_envs: int) -> VectorEnv:
        """Environments stepped one after another in this process."""
        ...

    def make_parallel(self, num_envs: int, tracks: Tracks, step_timeout: float) -> VectorEnv:
        """Environments in a process each, stepped together; each notes on its track when it is busy, and one that takes
        longer than that for a step has failed."""
        ...


class TensorStep(NamedTuple):
    """One step of N environments as tensors on their device, which are theirs and overwritten by the next step."""

    obs: Tensor
    final_obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor


class TensorEnv(Protocol):
    """N environments stepped as one batch of tensors. Where an episode ends, the next one begins in the same step."""

    spec: EnvSpec
    num_envs: int
    device: torch.device
    is_capturable: bool
    """Whether a step can be recorded as part of a CUDA graph: no question to the device, all state written in place."""

    def reset(self) -> Tensor:
        """Begin anew everywhere; the first observations."""
        ...

    def step(self, action: Tensor) -> TensorStep: ...

    def metrics(self) -> Metrics:
        """What the simulator has logged of itself since the last call."""
        ...

    def close(self) -> None: ...
