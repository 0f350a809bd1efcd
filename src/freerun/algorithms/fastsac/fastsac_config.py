"""The settings of fast SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from freerun.algorithms.fastsac.critic_heads import Twins
from freerun.algorithms.sac.off_policy_config import MOST_BATCH_SIZE, pace_words
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.core import Common, RunScale, UserError, require_positive

UPDATES_PER_VECTOR_STEP = 16.0


@dataclass(frozen=True)
class FastSACConfig(SACConfig):
    """SAC for thousands of environments: few gradient steps on large batches."""

    # The ideas are those of FastTD3 (arXiv 2505.22642), FastSAC (arXiv 2512.01996) and PQL (arXiv 2307.12983).
    updates_per_vector_step: Common[float | None] = None
    """Gradient steps per step of all environments together (if not given: 16, and at most one for each environment).
    --updates-per-step counts them per environment step instead."""
    policy: Common[Literal["stochastic", "deterministic"]] = "stochastic"
    """The stochastic policy of SAC, or the deterministic one of TD3 with noise of its own (--noise-range)."""
    noise_range: tuple[float, float] = (0.05, 0.4)
    """Of a deterministic policy: the deviation of its exploration noise, from the first environment to the last, for
    actions in [-1, 1]."""
    smoothing_std: float = 0.1
    """Of a deterministic policy: the deviation of the noise that is added to its actions in the critics' targets."""
    smoothing_limit: float = 0.3
    """Of a deterministic policy: that noise is cut off here."""
    policy_delay: int = 2
    """Gradient steps of the critics for each one of the policy."""
    critic: Common[Literal["scalar", "distribution"]] = "scalar"
    """Critics say the expected return, or a distribution over returns from --v-min to --v-max (C51)."""
    v_min: float = -10.0
    """The lowest return of a distribution."""
    v_max: float = 30.0
    """The highest return of a distribution."""
    num_atoms: int = 101
    """The number of returns in a distribution."""
    twins: Twins = "mean"
    """What counts of the two critics: the mean of both, or the smaller one, against overestimation."""
    layer_norm: bool = True
    """Normalise the hidden layers of the critics, before their nonlinearity."""
    actor_layer_norm: bool = False
    """Normalise the hidden layers of the policy, too. Their nonlinearity is then a ReLU, as that of the critics."""
    num_return_steps: int = 3
    """Rewards that are summed up before the value of an observation stands for the rest (n-step returns)."""
    normalize_obs: bool | None = None
    """Scale observations by their running mean and deviation (if not given: yes)."""
    initial_temperature: float = 0.01
    """The weight of the policy's entropy, at first: with few gradient steps it has no time to fall from 1."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers in the networks' products (auto: fp32)."""
    learning_rate: Common[float] = 1e-3
    """Adam's step size, of policy, critics and temperature. Gradients of batches this large have little noise, so a
    larger step than SAC's learns from fewer environment steps."""
    target_rate: float = 0.1
    """How fast the target critics follow the critics (tau)."""
    gamma: float = 0.99
    """Discount of later rewards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "policy_delay", "num_return_steps")
        if self.actor_layer_norm and self.activation != "relu":
            raise UserError(f"--actor-layer-norm has a ReLU behind it: leave --activation {self.activation} out")
        if self.learner in ("fast", "numpy"):
            raise UserError(f"--learner {self.learner} has no gradients of fast SAC: leave it out")
        if self.updates_per_vector_step is not None and self.updates_per_step is not None:
            raise UserError(
                f"--updates-per-vector-step {self.updates_per_vector_step:g} and --updates-per-step "
                f"{self.updates_per_step:g} say the same thing twice: give one of them, or None for the one of a file"
            )
        if (self.updates_per_vector_step or 0) < 0:
            raise UserError(f"--updates-per-vector-step must be 0 or more, not {self.updates_per_vector_step:g}")
        if self.v_min >= self.v_max or self.num_atoms < 2:
            raise UserError("--v-max must be above --v-min, with at least 2 --num-atoms between them")
        if not 0 <= self.noise_range[0] <= self.noise_range[1]:
            raise UserError("--noise-range must be two numbers, the second no less than the first")


def scaled_defaults(config: FastSACConfig, scale: RunScale) -> dict[str, Any]:
    """Return values for what was left open. The pace is recorded per environment step, as that of SAC is."""
    wanted = config.updates_per_vector_step
    values: dict[str, Any] = {
        "updates_per_step": min(1.0, UPDATES_PER_VECTOR_STEP / scale.num_envs),
        "batch_size": min(MOST_BATCH_SIZE, max(config.default_batch_size, 2 * scale.num_envs)),
        "normalize_obs": True,
    }
    values = {name: value for name, value in values.items() if getattr(config, name) is None}
    if wanted is not None:
        values |= {"updates_per_step": wanted / scale.num_envs, "updates_per_vector_step": None}
    return values


def learner_note(config: FastSACConfig, device: str) -> str:
    """What a run learns with, for its header."""
    return f"{pace_words(config)} · torch learner"
