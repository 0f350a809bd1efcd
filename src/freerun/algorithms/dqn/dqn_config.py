"""The settings of DQN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from freerun.algorithms.sac import off_policy_config
from freerun.algorithms.sac.off_policy_config import OffPolicyConfig
from freerun.core import Common, RunScale, UserError, require_positive

EPSILON_STEPS, EPSILON_STEPS_PER_ENV = 10_000, 100


@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    """DQN: what it learns from, how, and how it explores."""

    epsilon_start: float = 1.0
    """The probability of a random action, at first."""
    epsilon_end: Common[float] = 0.05
    """The probability of a random action, in the end."""
    epsilon_steps: Common[int | None] = None
    """Environment steps over which that probability falls, linearly (if not given: 10,000, and for more than 100
    environments that are tensors 100 steps of each)."""
    double: bool = True
    """The network chooses the best next action and the target network rates it (double DQN). Otherwise the target
    network does both, which overestimates."""
    duelling: bool = True
    """The last layer gives the value of the state and the advantages of actions, which add up to their values."""
    num_return_steps: int = 3
    """Rewards that are summed up before the value of an observation stands for the rest (n-step returns)."""
    target_rate: float = 0.005
    """How far the target network moves towards the network at a time (tau); 1 makes it a copy."""
    target_interval: int = 1
    """Gradient steps from one move of the target network to the next."""
    huber_delta: float = 10.0
    """Errors up to this count squared, and larger ones in proportion (the Huber loss)."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    batch_size: Common[int | None] = None
    """Steps in a gradient step (if not given: 128, and for many environments that are tensors two of each, at most
    8192)."""
    buffer_size: int = 100_000
    """Steps that the buffer holds; then new ones take the place of the oldest."""
    learning_rate: Common[float] = 5e-4
    """Adam's step size."""
    hidden_sizes: Common[tuple[int, ...]] = (128, 128)
    """Hidden layers of the network."""
    default_batch_size: ClassVar[int] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "epsilon_steps", "num_return_steps", "target_interval")
        if not 0 <= self.epsilon_start <= 1 or not 0 <= self.epsilon_end <= 1:
            raise UserError("--epsilon-start and --epsilon-end must lie between 0 and 1")
        if self.max_grad_norm <= 0 or self.huber_delta <= 0:
            raise UserError("--max-grad-norm and --huber-delta must be above 0")

    def epsilon_at(self, num_steps: int) -> float:
        """The probability of a random action after this many environment steps."""
        share = min(1.0, num_steps / (self.epsilon_steps or EPSILON_STEPS))
        return self.epsilon_start + (self.epsilon_end - self.epsilon_start) * share


def scaled_defaults(config: DQNConfig, scale: RunScale) -> dict[str, Any]:
    """Return values for what was left open (docs/defaults.md)."""
    values = off_policy_config.scaled_defaults(config, scale)
    if config.epsilon_steps is None:
        num_envs = scale.num_envs if scale.is_tensors else 1
        values["epsilon_steps"] = max(EPSILON_STEPS, EPSILON_STEPS_PER_ENV * num_envs)
    return values
