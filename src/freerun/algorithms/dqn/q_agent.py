"""The agent of DQN: the networks, and the gradient steps that train them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freerun.algorithms.dqn.dqn_config import DQNConfig
from freerun.algorithms.dqn.q_networks import QNetworks
from freerun.algorithms.dqn.q_steps import METRICS, AutogradQSteps, FastQSteps, QStepParts, QSteps
from freerun.algorithms.learners.fast_learner import uses_fast_learner
from freerun.algorithms.learners.shared_update import join_shares, share_of_rows
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.sac.replay_buffer import ReplaySample, StepBatch
from freerun.algorithms.sac.step_counters import StepCounters
from freerun.core import LearnerGroup, Metrics


class QAgent:
    """`learn` neither waits for the device nor moves a tensor.

    Several learners draw the same batch, and each computes the gradient of its share of the rows.
    """

    generators: tuple[torch.Generator, ...] = ()

    def __init__(self, spec: ActorSpec, config: DQNConfig, seed: int, device: torch.device, group: LearnerGroup):
        self._config, self._group = config, group
        self._share = 1 / group.count  # this learner's share of the rows of the last batch
        self.networks = QNetworks(spec, config, seed, device)
        self._counters = StepCounters(METRICS, device)
        make_steps = FastQSteps if uses_fast_learner(config.learner, device.type) else AutogradQSteps
        self._q_steps: QSteps = make_steps(QStepParts(self.networks, config, group, self._counters))

    def learn(self, sample: ReplaySample) -> Tensor:
        """Take one gradient step; returns the TD errors of the sample."""
        num_rows = len(sample.weight)
        mine = share_of_rows(self._group, num_rows)
        self._share = (mine.stop - mine.start) / num_rows
        td_error = self._q_steps.take(*sample.part(mine)[:2], self._share)
        return join_shares(self._group, td_error, num_rows) if self._config.replay == "prioritised" else td_error

    def td_error(self, steps: StepBatch) -> Tensor:
        with torch.no_grad():
            return self.networks.taken(steps) - self.networks.targets(steps)

    def metrics(self) -> Metrics:
        return self._counters.take_means(self._group, self._share)

    def export(self, policy: MLPActor, **statistics: Tensor) -> None:
        weights = {**self.networks.policy_arrays(), **statistics}
        policy.load(torch.cat([weights[name].reshape(-1).cpu() for name in policy.arrays]).numpy())

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"optimizer": self.networks.optimizer}

    def _tensors(self) -> dict[str, Tensor]:
        nets = self.networks
        return {"online": nets.weights.detach(), "target": nets.target_weights, "num_steps": nets.num_steps}

    def state_dict(self) -> dict[str, Any]:
        return {**self._tensors(), "optimizer": self.networks.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        # A copy, because torch keeps the tensors that it is given.
        self.networks.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
