"""The agent of soft actor-critic: a policy, twin critics, a temperature, and the gradient steps that train them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from freerun.algorithms.learners.fast_learner import learner_words, uses_fast_learner
from freerun.algorithms.learners.shared_update import join_shares, share_of_rows
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.sac.gpu_steps import GPUSoftSteps
from freerun.algorithms.sac.off_policy_config import OffPolicyConfig, pace_words
from freerun.algorithms.sac.replay_buffer import ReplaySample, StepBatch
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.algorithms.sac.soft_networks import SoftNetworks, critic_values
from freerun.algorithms.sac.soft_steps import (
    METRICS,
    AutogradSoftSteps,
    FastSoftSteps,
    SoftSteps,
    StepParts,
)
from freerun.algorithms.sac.step_counters import StepCounters
from freerun.core import LearnerGroup, Metrics, SingleLearner


def is_written_out(config: OffPolicyConfig, device: str) -> bool:
    """True if the gradients of policy and critics are written out; else autograd computes them."""
    return uses_fast_learner(config.learner, device, device_types=("cpu", "cuda"))


def learner_note(config: OffPolicyConfig, device: str) -> str:
    """What a run learns with, for its header."""
    return f"{pace_words(config)} · {learner_words(is_written_out(config, device))}"


class SoftAgent:
    """Policy, twin critics and temperature. `learn` neither waits for the device nor moves a tensor.

    Several learners draw the same batch, and each computes the gradient of its share of the rows.
    """

    def __init__(
        self,
        spec: ActorSpec,
        config: SACConfig,
        seed: int,
        device: torch.device,
        learner_group: LearnerGroup | None = None,
        networks: SoftNetworks | None = None,
        make_steps: Callable[[StepParts], SoftSteps] | None = None,
    ):
        """`networks` and `make_steps` replace SAC's own networks and gradient steps, for algorithms that vary them."""
        if make_steps is None:
            make_steps = AutogradSoftSteps
            if is_written_out(config, device.type):
                make_steps = FastSoftSteps if device.type == "cpu" else GPUSoftSteps
        self._learner_group = learner_group or SingleLearner()
        self._share = 1 / self._learner_group.count  # this learner's share of the rows of the last batch
        self._config = config
        self._device = device
        self.networks = networks or SoftNetworks(spec, config.learning_rate, seed, device, config.initial_temperature)
        self.generator = torch.Generator(device).manual_seed(seed)
        self._counters = StepCounters(METRICS, device)
        # The usual heuristic: minus the number of actions (Haarnoja et al. 2018b, appendix D)
        num_actions = self.networks.num_actions
        target_entropy = -float(num_actions) if config.target_entropy is None else config.target_entropy
        parts = StepParts(self.networks, config, target_entropy, self._learner_group, self._counters)
        self.soft_steps = make_steps(parts)

    @property
    def weights(self) -> Tensor:
        """The temperature's logarithm and the policy's weights, end to end."""
        return self.networks.actor_weights

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        return (self.generator,)

    # ------------------------------------------------------------------------------------------ the gradient step

    def learn(self, sample: ReplaySample) -> Tensor:
        """Take one gradient step of critics, policy and temperature; returns the TD errors of the sample."""
        return self.learn_by(self.soft_steps, sample)

    def learn_by(self, soft_steps: SoftSteps, sample: ReplaySample) -> Tensor:
        """Let `soft_steps` take one gradient step, of what it trains; returns the TD errors of the sample."""
        num_rows = len(sample.steps.reward)
        # For the whole batch, also where this learner computes a share of it: the generators of all stay in step.
        shape = (2 * num_rows, self.networks.num_actions)
        noise = torch.randn(shape, generator=self.generator, device=self._device)
        if self._learner_group.count > 1:
            sample, noise = self._share_of(sample, noise)
        td_error = soft_steps.take(sample.steps, sample.weight, noise, self._share)
        if self._config.replay == "prioritised":
            td_error = join_shares(self._learner_group, td_error, num_rows)
        return td_error

    def _share_of(self, sample: ReplaySample, noise: Tensor) -> tuple[ReplaySample, Tensor]:
        """This learner's rows of a sample, and of the noise for both ends of its steps."""
        num_rows = len(sample.steps.reward)
        mine = share_of_rows(self._learner_group, num_rows)
        self._share = (mine.stop - mine.start) / num_rows
        my_noise = noise.view(2, num_rows, -1)[:, mine].reshape(2 * (mine.stop - mine.start), -1)
        return sample.part(mine), my_noise

    # ------------------------------------------------------------------------------------------ measuring

    def td_error(self, steps: StepBatch) -> Tensor:
        """How far the critics are off, per step, without learning from it."""
        with torch.no_grad():
            noise = torch.zeros((2 * len(steps.reward), self.networks.num_actions), device=self._device)
            _, _, target = self.networks.critic_targets(steps, noise, self._config.gamma)
            return (critic_values(self.networks.critics, steps.obs, steps.action) - target).mean(dim=0)

    def metrics(self) -> Metrics:
        return self._counters.take_means(self._learner_group, self._share)

    # ------------------------------------------------------------------------------------------ exporting and keeping

    def export(self, policy: MLPActor, **statistics: Tensor) -> None:
        """Copy the policy's weights, and the statistics of a normaliser by name, into the workers' policy."""
        weights: dict[str, Tensor] = {**dict(self.networks.policy.net.named_parameters()), **statistics}
        policy.load(torch.cat([weights[name].detach().reshape(-1) for name in policy.arrays]).cpu().numpy())

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimisers by their names in `state_dict()`."""
        return {
            "actor_optimizer": self.networks.actor_optimizer,
            "critic_optimizer": self.networks.critic_optimizer,
        }

    def _weights_by_name(self) -> dict[str, Tensor]:
        nets = self.networks
        return {"actor": nets.actor_weights, "critics": nets.critic_weights, "targets": nets.target_weights}

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: weights.detach() for name, weights in self._weights_by_name().items()},
            **{name: optimizer.state_dict() for name, optimizer in self.optimizers().items()},
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, weights in self._weights_by_name().items():
            weights.data.copy_(state[name])
        for name, optimizer in self.optimizers().items():
            # A copy, because torch keeps the tensors that it is given.
            optimizer.load_state_dict(copy.deepcopy(state[name]))
        self.generator.set_state(state["generator"].cpu())
