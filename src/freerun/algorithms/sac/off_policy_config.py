"""The settings that off-policy algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from freerun.algorithms.learners.fast_learner import Learner
from freerun.algorithms.policies.mlp_actor import Activation
from freerun.algorithms.sac.replay_buffer import ReplayConfig
from freerun.core import Acceleration, Common, RunScale, UserError, require_positive

MOST_BATCH_SIZE = 8192
MOST_UPDATES_PER_VECTOR_STEP = 64
"""A step of thousands of environments does not pay for as many gradient steps as the same number of single steps."""


@dataclass(frozen=True)
class OffPolicyConfig(ReplayConfig):
    """What an off-policy algorithm learns from, and how."""

    steps_per_update: Common[int | None] = None
    """Collect this many steps, then learn at the ratio of --updates-per-step and publish new weights (if not given:
    what the mode hands over at a time, or else 50)."""
    updates_per_step: Common[float | None] = None
    """Gradient steps of the agent per environment step, in every mode (if not given: 1, and for more than 64
    environments that are tensors 64 per step of all of them)."""
    learning_starts: Common[int] = 1000
    """Steps collected before the first gradient step, at most --buffer-size; the untrained policy's actions are spread
    over their range."""
    batch_size: Common[int | None] = None
    """Steps in a gradient step (if not given: 256, and for many environments that are tensors two of each, at most
    8192)."""
    learning_rate: Common[float] = 3e-4
    """Adam's step size, of all that is learned."""
    gamma: float = 0.99
    """Discount of later rewards."""
    target_rate: float = 0.005
    """How fast the target critics follow the critics (tau)."""
    hidden_sizes: Common[tuple[int, ...]] = (256, 256)
    """Hidden layers of the policy and of the critics."""
    activation: Activation = "relu"
    """Nonlinearity between the policy's layers."""
    learner: Learner = "auto"
    """On a CPU: who computes gradients. fast and numpy have them written out in numpy; torch uses autograd (auto: fast
    wherever it can be used)."""
    acceleration: Acceleration = "auto"
    """On a GPU: record gradient steps as CUDA graphs (graph), and fuse their kernels before (compile: takes half a
    minute at the start)."""
    default_steps_per_update: ClassVar[int] = 50
    default_batch_size: ClassVar[int] = 256
    defaults_per_step: ClassVar[Mapping[str, float]] = {"updates_per_step": 1.0}
    """The default amounts of work per environment step, as long as there are not too many environments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "steps_per_update", "batch_size")
        if (self.updates_per_step or 0) < 0 or self.learning_starts < 0:
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

    @property
    def rows_per_batch(self) -> int:
        """`batch_size`, or its default."""
        return self.batch_size or self.default_batch_size

    def work_per_step(self, name: str) -> float:
        """An amount of work per environment step, such as `updates_per_step`, or its default."""
        amount: float | None = getattr(self, name)
        return self.defaults_per_step[name] if amount is None else amount


def pace_words(config: OffPolicyConfig) -> str:
    """How much is learned from each step, for the header of a run."""
    return (
        f"updates of {config.num_steps_per_update:,} steps, {config.work_per_step('updates_per_step'):.3g} gradient "
        f"steps per step on batches of {config.rows_per_batch:,}"
    )


def scaled_defaults(config: OffPolicyConfig, scale: RunScale) -> dict[str, Any]:
    """Return values for what was left open (docs/defaults.md)."""
    num_envs = scale.num_envs if scale.is_tensors else 1
    less = min(1.0, MOST_UPDATES_PER_VECTOR_STEP / num_envs)
    values: dict[str, Any] = {name: amount * less for name, amount in config.defaults_per_step.items()}
    values["batch_size"] = min(MOST_BATCH_SIZE, max(config.default_batch_size, 2 * num_envs))
    return {name: value for name, value in values.items() if getattr(config, name) is None}
