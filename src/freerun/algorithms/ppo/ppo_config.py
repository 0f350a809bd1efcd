"""PPO's settings, and the sizes that it learns with if they are left open."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from freerun.algorithms.learners.fast_learner import Learner, kernel_for, learner_words, uses_fast_learner
from freerun.algorithms.policies.image_layers import IMAGE_NETWORKS, chosen_network
from freerun.algorithms.policies.mlp_actor import Activation
from freerun.algorithms.policies.numpy_memory import MemoryKind
from freerun.core import Acceleration, Common, ComputedBy, EnvSpec, RunScale, UserError, require_positive

STEPS_PER_UPDATE, MINIBATCH_SIZE, NUM_EPOCHS, LEARNING_RATE = 2048, 64, 10, 3e-4
"""The defaults for one environment, which are those of Stable-Baselines3, so that runs can be compared."""
LEAST_STEPS_PER_ENV = 12
"""An update has at least this many steps of every environment."""
MEMORY_MINIBATCH_SIZE = 256
"""The smallest default minibatch of policies with a memory: their rows are sequences, which are alike within."""
NUM_MINIBATCHES = 8
"""The minibatches of an epoch with more environments."""
TENSOR_MINIBATCHES, TENSOR_EPOCHS = 4, 5
"""Minibatches and epochs for environments that are tensors, as in RSL-RL."""
MAX_LEARNING_RATE = 1e-3
"""The default learning rate does not grow beyond this."""


@dataclass(frozen=True)
class PPOConfig:
    """PPO: what it learns from and how."""

    episodes_per_update: Common[int | None] = None
    """Whole episodes that each update learns from."""
    steps_per_update: Common[int | None] = None
    """Steps that each update learns from, rounded up to whole episodes or segments (if neither is given: 2048, and 12
    of each environment where more than 170 run at once). docs/defaults.md explains this and the next defaults."""
    learning_rate: Common[float | None] = None
    """Adam's step size (if not given: 3e-4, and more where minibatches are larger than 64)."""
    anneal_learning_rate: bool = False
    """Lower the learning rate linearly to zero over the run."""
    desired_kl: float | None = None
    """Raise or lower the learning rate before each gradient step but the first of an update, so that updates move the
    policy by about this far (the KL divergence of the step's minibatch, whose mean is logged as approx_kl)."""
    num_epochs: int | None = None
    """Passes over the data of an update (if not given: 10, and 5 for environments that are tensors)."""
    minibatch_size: Common[int | None] = None
    """Steps per gradient step (if not given: 64 for a single environment, 256 or more for others, and a quarter of an
    update for environments that are tensors)."""
    # The defaults from here to max_grad_norm are those of Stable-Baselines3.
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
    value_clip: float | None = None
    """How far a value may move from the one before the update before its loss stops falling, in the units of the
    scaled rewards. (No limit if not given.)"""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: float | None = None
    """End an update early once the policy has moved this far (× 1.5) from the one it started with."""
    normalize_advantage: bool | None = None
    """Scale advantages to mean 0 and deviation 1. (If not given: yes, and no where rewards are scaled already, if there
    is a --memory or more than 4 environments, and no entropy bonus; see docs/defaults.md.)"""
    advantage_rows: Literal["minibatch", "update"] = "minibatch"
    """The rows over which --normalize-advantage takes mean and deviation: each minibatch, or the whole update."""
    normalize_obs: bool | None = None
    """Scale observations by their running mean and deviation, except those whose range is within -1 to 1 and images;
    the statistics travel with the weights. --no-normalize-obs leaves all as they are (if not given: yes, and no for
    environments that are tensors)."""
    normalize_reward: bool | None = None
    """Divide rewards by the running deviation of the discounted return, which is summed for every environment from
    the start of an episode to its end (if not given: yes, and no for environments that are tensors)."""
    lag_correction: Literal["decoupled", "vtrace"] = "decoupled"
    """How to learn from steps taken with older weights: weigh them (the decoupled objective), or also correct
    advantages and value targets along the way (V-trace). Without lag there is no difference."""
    max_importance_weight: float = 2.0
    """Limit of the weight of steps taken with older weights (V-trace: 1); it is exactly 1 without lag."""
    network: str | None = None
    """auto, mlp, nature, impala or small-cnn (docs/images.md), or your own network as module:callable
    (docs/own_networks.md). auto, the default, takes a CNN where observations hold images, and an MLP elsewhere."""
    hidden_sizes: Common[tuple[int, ...]] = (64, 64)
    """Hidden layers of the policy and of the value function."""
    activation: Activation = "tanh"
    """Nonlinearity between layers."""
    memory: Common[MemoryKind] = "none"
    """A recurrent cell in front of the MLPs, which remembers earlier observations of an episode; see docs/memory.md."""
    memory_size: int = 64
    """The units of that cell."""
    sequence_steps: int = 64
    """With --memory: the steps through which gradients flow back in time. Minibatches consist of such sequences."""
    burn_in: int = 0
    """With --memory: steps before each sequence that every gradient step goes through again without learning from them,
    so that what is remembered at its start is that of the newest weights."""
    initial_log_std: float = 0.0
    """For actions in a Box: the logarithm of their deviation before anything is learned. At 0 most actions of an
    environment with a range of ±1 are cut off at its ends, and -1 often learns more."""
    learner: Learner = "auto"
    """On a CPU: who computes gradients. fast has them written out, for MLPs, in C where a compiler is found; numpy does
    the same without a compiler; torch uses autograd, for any network (auto: fast wherever it can be used)."""
    acceleration: Acceleration = "auto"
    """On a GPU: record gradient steps as CUDA graphs (auto, graph), fuse their kernels too (compile: half a minute
    before the first), or do neither (none). A recorded epoch leaves out rows that do not fill a minibatch. Updates of a
    few uneven minibatches go without, and so do networks of your own that wait for the GPU."""

    def __post_init__(self) -> None:
        if self.episodes_per_update is not None and self.steps_per_update is not None:
            raise UserError("give --episodes-per-update or --steps-per-update, not both")
        names = ("episodes_per_update", "steps_per_update", "num_epochs", "minibatch_size", "max_importance_weight")
        require_positive(self, *names, "memory_size", "sequence_steps")
        for name, value in (("gamma", self.gamma), ("gae_lambda", self.gae_lambda)):
            if not 0 <= value <= 1:
                raise UserError(f"--{name.replace('_', '-')} must lie between 0 and 1, not {value}")
        if self.desired_kl is not None and self.desired_kl <= 0:
            raise UserError(f"--desired-kl must be above 0, not {self.desired_kl:g}")
        if self.desired_kl is not None and self.anneal_learning_rate:
            raise UserError("--desired-kl and --anneal-learning-rate both set the learning rate: give one of them")
        if self.value_clip is not None and self.value_clip <= 0:
            raise UserError(f"--value-clip must be above 0, not {self.value_clip:g}")
        if self.has_memory and self.network not in (None, "auto", "mlp"):
            raise UserError(f"--memory goes with an MLP: leave --network {self.network} out, or --memory")
        if self.burn_in and not self.has_memory:
            raise UserError("--burn-in is for policies with a memory: give --memory gru or lstm, or leave it out")
        if not 0 <= self.burn_in < self.sequence_steps:
            raise UserError(f"--burn-in must be at least 0 and below --sequence-steps, not {self.burn_in}")
        if self.clip_range <= 0 or (self.learning_rate is not None and self.learning_rate <= 0):
            raise UserError("--learning-rate and --clip-range must be above 0")

    @property
    def has_memory(self) -> bool:
        return self.memory != "none"

    @property
    def normalizes_minibatches(self) -> bool:
        return self.normalize_advantage is not False and self.advantage_rows == "minibatch"

    @property
    def normalizes_update(self) -> bool:
        return self.normalize_advantage is not False and self.advantage_rows == "update"


def scaled_defaults(config: PPOConfig, scale: RunScale) -> dict[str, Any]:
    """Return values for what was left open (docs/defaults.md says why these)."""
    usual_steps = max(STEPS_PER_UPDATE, LEAST_STEPS_PER_ENV * scale.num_envs)
    steps = config.steps_per_update or scale.unit_steps or usual_steps
    minibatch_size = config.minibatch_size
    if minibatch_size is None:
        minibatch_size = MINIBATCH_SIZE
        if scale.is_tensors:
            minibatch_size = max(MINIBATCH_SIZE, steps // TENSOR_MINIBATCHES)
        elif scale.num_envs > 1 and scale.unit_steps is None:
            minibatch_size = usual_steps // NUM_MINIBATCHES
        if config.has_memory:
            minibatch_size = max(MEMORY_MINIBATCH_SIZE, minibatch_size)
    # The noise of a gradient falls with the square root of the rows that it is averaged over, so a step may be longer.
    learning_rate = min(MAX_LEARNING_RATE, LEARNING_RATE * (minibatch_size / MINIBATCH_SIZE) ** 0.5)
    normalize_reward = not scale.is_tensors if config.normalize_reward is None else config.normalize_reward
    values: dict[str, Any] = {
        "minibatch_size": minibatch_size,
        "num_epochs": TENSOR_EPOCHS if scale.is_tensors else NUM_EPOCHS,
        "learning_rate": max(LEARNING_RATE, round(learning_rate, 6)),
        # Tensors come from simulators whose authors have scaled them, and the statistics would be a wait for the GPU.
        "normalize_obs": not scale.is_tensors,
        "normalize_reward": normalize_reward,
        "normalize_advantage": not (normalize_reward and _keeps_advantages(config, scale)),
    }
    if config.episodes_per_update is None:
        values["steps_per_update"] = steps
    return {name: value for name, value in values.items() if getattr(config, name) is None}


def _keeps_advantages(config: PPOConfig, scale: RunScale) -> bool:
    """Whether advantages are better left as they are, where scaled rewards keep them at about 1 from the start.

    What is left of the advantages late in a training is mostly noise, and deviation 1 makes that as large as what was
    learned from. Recurrent policies forgot what they had learned. Segments of many environments hold only a part of
    each episode, so their advantages are noisy, too, and Hopper learned less (docs/defaults.md). An entropy bonus is
    meant to be weighed against advantages of deviation 1.
    """
    is_noisy = config.has_memory or not scale.has_few_envs
    return is_noisy and config.entropy_coef == 0 and config.advantage_rows == "minibatch"


def with_network(config: PPOConfig, env: EnvSpec) -> PPOConfig:
    """Return settings with the network that is used: `auto` and `mlp` become the name of one, or None for an MLP."""
    network = chosen_network(config.network, env)
    if config.has_memory and network is not None:
        raise UserError(
            "--memory goes with an MLP, and images get another network: leave --memory out, or give --network mlp, "
            "which takes pixels as any other numbers"
        )
    return dataclasses.replace(config, network=network)


def with_sizes(config: PPOConfig) -> PPOConfig:
    """Return settings without open sizes: those of one environment, where nobody has filled them in."""
    return dataclasses.replace(config, **scaled_defaults(config, RunScale()))


def computed_by(config: PPOConfig, device: str) -> ComputedBy:
    if not uses_fast_learner(config.learner, device, config.network, config.has_memory):
        return "torch"
    return "numpy" if kernel_for(config.learner, config.hidden_sizes) is None else "kernel"


def learner_note(config: PPOConfig, device: str) -> str:
    """What a run learns with, for its header."""
    steps, episodes = config.steps_per_update, config.episodes_per_update
    updates = f"{episodes} episodes" if steps is None else f"{steps:,} steps"
    network = f"{config.network} · " if config.network in IMAGE_NETWORKS else ""
    made_by = computed_by(config, device)
    learner = network + learner_words(made_by != "torch")
    if made_by == "kernel":
        learner += ", compiled"
    return (
        f"updates of {updates}, {config.num_epochs} epochs of minibatches of {config.minibatch_size:,}, "
        f"learning rate {config.learning_rate:g} · {learner}"
    )
