"""PPO's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freerun.algorithms.learners.fast_learner import Learner
from freerun.algorithms.policies.mlp_actor import Activation
from freerun.core import Acceleration, Common, UserError, require_positive


@dataclass(frozen=True)
class PPOConfig:
    """PPO: what it learns from and how."""

    episodes_per_update: Common[int | None] = None
    """Whole episodes that each update learns from."""
    steps_per_update: Common[int | None] = None
    """Steps that each update learns from, rounded up to whole episodes (2048 if neither is given)."""
    # The defaults from here to max_grad_norm are those of Stable-Baselines3, so that runs can be compared.
    learning_rate: Common[float] = 3e-4
    """Adam's step size."""
    anneal_learning_rate: bool = False
    """Lower the learning rate linearly to zero over the run."""
    num_epochs: int = 10
    """Passes over the data of an update."""
    minibatch_size: Common[int] = 64
    """Steps per gradient step."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Trades bias against variance of the advantages: 0 trusts the value function, 1 trusts the returns."""
    clip_range: float = 0.2
    """How far the probability of an action may move in one update."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: float | None = None
    """End an update early once the policy has moved this far (× 1.5) from the one it started with."""
    normalize_advantage: bool = True
    """Scale advantages to mean 0 and deviation 1 in each minibatch."""
    normalize_obs: bool = False
    """Scale observations by their running mean and deviation; the statistics travel with the weights."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return, which is summed for every environment from
    the start of an episode to its end."""
    lag_correction: Literal["decoupled", "vtrace"] = "decoupled"
    """How to learn from steps taken with older weights: weigh them (the decoupled objective), or also correct
    advantages and value targets along the way (V-trace). Without lag there is no difference."""
    max_importance_weight: float = 2.0
    """Limit of the weight of steps taken with older weights (V-trace: 1); it is exactly 1 without lag."""
    network: str | None = None
    """Your own network as module:callable, for images and the like; see docs/own_networks.md. (An MLP if not given.)"""
    hidden_sizes: Common[tuple[int, ...]] = (64, 64)
    """Hidden layers of the policy and of the value function."""
    activation: Activation = "tanh"
    """Nonlinearity between layers."""
    initial_log_std: float = 0.0
    """For actions in a Box: the logarithm of their deviation before anything is learned. At 0 most actions of an
    environment with a range of ±1 are cut off at its ends, and -1 often learns more."""
    learner: Learner = "auto"
    """On a CPU: who computes gradients. fast has them written out in numpy, for MLPs; torch uses autograd, for any
    network (auto: fast wherever it can be used)."""
    acceleration: Acceleration = "auto"
    """On a GPU: record gradient steps as CUDA graphs (auto, graph), fuse their kernels too (compile: half a minute
    before the first), or do neither (none). Updates of uneven size and --target-kl go without."""

    def __post_init__(self) -> None:
        if self.episodes_per_update is not None and self.steps_per_update is not None:
            raise UserError("give --episodes-per-update or --steps-per-update, not both")
        names = ("episodes_per_update", "steps_per_update", "num_epochs", "minibatch_size", "max_importance_weight")
        require_positive(self, *names)
        for name, value in (("gamma", self.gamma), ("gae_lambda", self.gae_lambda)):
            if not 0 <= value <= 1:
                raise UserError(f"--{name.replace('_', '-')} must lie between 0 and 1, not {value}")
        if self.learning_rate <= 0 or self.clip_range <= 0:
            raise UserError("--learning-rate and --clip-range must be above 0")
