"""The settings of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from freerun.algorithms.learners.fast_learner import Learner
from freerun.algorithms.policies.mlp_actor import Activation
from freerun.algorithms.sac.replay_buffer import ReplayConfig
from freerun.core import Acceleration, Common, UserError, require_positive


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    """SAC: what it learns from and how."""

    steps_per_update: Common[int | None] = None
    """Collect this many steps, then learn at the ratio of --updates-per-step and publish new weights (if not given:
    what the mode hands over at a time, or else 50)."""
    updates_per_step: Common[float] = 1.0
    """Gradient steps of the agent per environment step, in every mode."""
    learning_starts: Common[int] = 1000
    """Steps collected before the first gradient step, at most --buffer-size; the untrained policy's actions are spread
    over their range."""
    # This, the learning rate, gamma, tau and the networks are those of Haarnoja et al. 2018b (appendix D).
    batch_size: Common[int] = 256
    """Steps in a gradient step."""
    learning_rate: Common[float] = 3e-4
    """Adam's step size, of policy, critics and temperature."""
    gamma: float = 0.99
    """Discount of later rewards."""
    target_rate: float = 0.005
    """How fast the target critics follow the critics (tau)."""
    target_entropy: float | None = None
    """What the temperature aims for (minus the number of actions if not given)."""
    hidden_sizes: Common[tuple[int, ...]] = (256, 256)
    """Hidden layers of the policy and of the critics."""
    activation: Activation = "relu"
    """Nonlinearity between the policy's layers."""
    learner: Learner = "auto"
    """On a CPU: who computes gradients. fast has them written out in numpy; torch uses autograd (auto: fast wherever it
    can be used)."""
    acceleration: Acceleration = "auto"
    """On a GPU: record gradient steps as CUDA graphs (graph), and fuse their kernels before (compile: takes half a
    minute at the start)."""
    default_steps_per_update: ClassVar[int] = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "steps_per_update", "batch_size")
        if self.updates_per_step < 0 or self.learning_starts < 0:
            raise UserError("--updates-per-step and --learning-starts must be 0 or more")
        if self.buffer_size < self.learning_starts:
            raise UserError(
                f"learning would never start: a buffer of --buffer-size {self.buffer_size} steps cannot hold the "
                f"--learning-starts {self.learning_starts} that it waits for; raise the one or lower the other"
            )
        if not 0 <= self.gamma <= 1 or not 0 < self.target_rate <= 1:
            raise UserError("--gamma must lie between 0 and 1, --target-rate above 0 and up to 1")
        if self.learning_rate <= 0:
            raise UserError("--learning-rate must be above 0")

    @property
    def num_steps_per_update(self) -> int:
        """`steps_per_update`, or its default."""
        return self.steps_per_update or self.default_steps_per_update
