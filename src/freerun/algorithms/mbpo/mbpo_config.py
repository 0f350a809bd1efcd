"""The settings of MBPO and of its dynamics model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from freerun.algorithms.mbpo.terminations import LEARNED, find
from freerun.algorithms.sac import off_policy_config
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.core import Common, RunScale, UserError, require_positive

HOLDOUT_SHARE, MAX_HELD_OUT = 0.2, 5000
"""The part of the steps on which the dynamics model is validated, as in the paper's code."""
MIN_STEPS = math.ceil(1 / HOLDOUT_SHARE)
"""With fewer steps none would be held out and no error could be measured; the deviation of one step is not a number."""


def _require_above_zero(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")


@dataclass(frozen=True)
class DynamicsConfig(SACConfig):
    """The dynamics model of MBPO."""

    # The networks, the elites, the learning rate and the batch size are those of the paper's code.
    num_models: int = 7
    """Networks in the ensemble."""
    num_elites: int = 5
    """The best of them on steps that were held out; the others are not rolled out."""
    model_hidden_sizes: tuple[int, ...] = (200, 200, 200, 200)
    """Hidden layers of the model."""
    model_learning_rate: float = 1e-3
    """Adam's step size for the model."""
    model_batch_size: int = 256
    """Steps in a gradient step of each network of the model."""
    model_updates_per_step: float | None = None
    """Gradient steps of the model per environment step, at most: a training ends early once it no longer helps (if not
    given: 10, and less for more than 64 environments that are tensors)."""
    steps_per_model_training: int = 250
    """Environment steps from one training of the model to the next."""
    termination: str = LEARNED
    """When episodes end in the model: learned, never, the rule of a known environment (hopper, walker2d, ant,
    humanoid, inverted-pendulum), or your own function of the next observations as module:callable."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_elites <= self.num_models:
            raise UserError(f"--num-elites must lie between 1 and --num-models, not {self.num_elites}")
        require_positive(self, "model_batch_size", "steps_per_model_training", "model_hidden_sizes")
        num_first_steps = max(self.learning_starts, self.num_steps_per_update)
        if min(num_first_steps, self.buffer_size) < MIN_STEPS:
            raise UserError(
                f"the model needs {MIN_STEPS} steps for its first training, of which it holds one out: raise "
                f"--learning-starts (or --steps-per-update) and --buffer-size to at least {MIN_STEPS}"
            )
        for name in ("model_learning_rate", "model_updates_per_step"):
            _require_above_zero(name, getattr(self, name))
        find(self.termination)


@dataclass(frozen=True)
class MBPOConfig(DynamicsConfig):
    """MBPO: what it learns from and how."""

    defaults_per_step: ClassVar[Mapping[str, float]] = {
        "updates_per_step": 20.0,
        "model_updates_per_step": 10.0,
        "rollouts_per_step": 400.0,
    }
    updates_per_step: Common[float | None] = None
    """Gradient steps of the agent per environment step, in every mode (if not given: 20, and less for more than 64
    environments that are tensors)."""
    rollouts_per_step: float | None = None
    """Model rollouts per environment step, each from a real observation (if not given: 400, and less for more than 64
    environments that are tensors)."""
    rollout_length: Common[int] = 1
    """Steps of a model rollout, at first."""
    rollout_length_end: int | None = None
    """Steps of a model rollout in the end (if not given: as at first)."""
    rollout_growth: tuple[int, int] = (20_000, 100_000)
    """Environment steps after --learning-starts between which rollouts grow from the first length to the last."""
    model_steps_kept: int | None = None
    """Learn from the model rollouts of this many environment steps; older ones are forgotten (if not given: 1,000, and
    at least the steps of one update)."""
    real_share: float = 0.05
    """Share of real steps in each of the agent's batches; the others are the model's."""
    agent: Literal["soft", "fast"] = "soft"
    """Who learns: soft is SAC's agent, as in the paper; fast is fast SAC's, for tasks of many short steps. Its critics
    have layer norm, the mean of both counts, and the next rewards of a real step are summed up."""
    num_return_steps: int = 3
    """With --agent fast: rewards of a real step and of those after it that are summed up before the value of an
    observation stands for the rest. Steps of the model have one."""
    stages: Literal["auto", "in-turn", "concurrent"] = "auto"
    """Train the model, roll it out and train the agent in turn or at the same time (auto: as the mode does with
    collecting)."""
    default_model_steps_kept: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "rollout_length", "model_steps_kept", "num_return_steps")
        _require_above_zero("rollouts_per_step", self.rollouts_per_step)
        if self.rollout_length_end is not None and self.rollout_length_end < self.rollout_length:
            raise UserError("--rollout-length-end must be no less than --rollout-length")
        if not 0 <= self.rollout_growth[0] < self.rollout_growth[1]:
            raise UserError("--rollout-growth must be two rising numbers of steps")
        if not 0 <= self.real_share <= 1:
            raise UserError(f"--real-share must lie between 0 and 1, not {self.real_share}")
        if self.agent == "fast" and self.learner in ("fast", "numpy"):
            raise UserError(f"--learner {self.learner} has no gradients of --agent fast: leave one of the two out")

    @property
    def num_model_steps_kept(self) -> int:
        """`model_steps_kept`, or its default."""
        # Of an update of thousands of environments, all but the last rollouts would otherwise be forgotten at once, and
        # the agent would learn from those few again and again.
        return self.model_steps_kept or max(self.default_model_steps_kept, self.num_steps_per_update)

    @property
    def sums_up_rewards(self) -> bool:
        """True if the agent learns from other rows of real steps than the model does."""
        return self.agent == "fast" and self.num_return_steps > 1

    def length_at(self, num_steps: int) -> int:
        """The length of model rollouts after this many real steps, of which the first are exploration."""
        # A thresholded linear function (Janner et al. 2019, appendix C):
        # k(n) = min(max(first + (n - begin) / (end - begin) * (last - first), first), last)
        first, last = self.rollout_length, self.rollout_length_end or self.rollout_length
        begin, end = self.rollout_growth
        # The paper's code counts from the first step after exploration.
        num_learned = num_steps - self.learning_starts
        share = min(1.0, max(0.0, (num_learned - begin) / (end - begin)))
        return int(first + share * (last - first))


def with_learner(config: MBPOConfig) -> MBPOConfig:
    """Return the settings with who computes gradients: those of fast SAC's agent are not written out."""
    return replace(config, learner="torch") if config.agent == "fast" else config


def scaled_defaults(config: MBPOConfig, scale: RunScale) -> dict[str, Any]:
    """Return values for what was left open: those of every off-policy algorithm, and the model steps that are kept."""
    sized = replace(config, steps_per_update=config.steps_per_update or scale.unit_steps)
    return {**off_policy_config.scaled_defaults(config, scale), "model_steps_kept": sized.num_model_steps_kept}
