"""The agent of soft actor-critic: a policy, twin critics, a temperature, and the gradient step that trains them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from freerun.algorithms.actor import Activation, ActorSpec, MLPActor
from freerun.algorithms.networks import StackedMLP, mlp, share_one_buffer, squash
from freerun.algorithms.replay import Draw, ReplayConfig, Steps
from freerun.algorithms.sharing import average, portion, whole
from freerun.capture import choose, fused
from freerun.core import Acceleration, Alone, Metrics, Peers, UserError, require_positive


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    steps_per_update: int | None = None
    """Collect so many steps, then learn at the ratio of --updates-per-step and publish new weights (if not given: what
    the mode hands over at a time, or else 50)."""
    updates_per_step: float = 1.0
    """Gradient steps of the agent per environment step, in every mode."""
    learning_starts: int = 1000
    """Steps collected before the first gradient step; the untrained policy's actions are spread over their range."""
    batch_size: int = 256
    """Steps in a gradient step."""
    learning_rate: float = 3e-4
    """Adam's step size, of policy, critics and temperature."""
    gamma: float = 0.99
    """Discount of later rewards."""
    target_rate: float = 0.005
    """How fast the target critics follow the critics (tau)."""
    target_entropy: float | None = None
    """What the temperature aims for (minus the number of actions if not given)."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Hidden layers of the policy and of the critics."""
    activation: Activation = "relu"
    """Nonlinearity between the policy's layers."""
    acceleration: Acceleration = "auto"
    """On a GPU: record gradient steps as CUDA graphs (graph), and fuse their kernels before (compile: takes half a
    minute at the start)."""
    default_max_lag: ClassVar[int | None] = None
    default_steps_per_update: ClassVar[int] = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "steps_per_update", "batch_size")
        if self.updates_per_step < 0 or self.learning_starts < 0:
            raise UserError("--updates-per-step and --learning-starts must be 0 or more")
        if not 0 <= self.gamma <= 1 or not 0 < self.target_rate <= 1:
            raise UserError("--gamma must lie between 0 and 1, --target-rate above 0 and up to 1")
        if self.learning_rate <= 0:
            raise UserError("--learning-rate must be above 0")


class SoftPolicy(nn.Module):
    """The policy's network, and the temperature that is trained with it."""

    def __init__(self, spec: ActorSpec):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.net = mlp((spec.obs_size, *spec.hidden_sizes, spec.output_size), spec.activation, output_gain=0.01)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in [-1, 1] and their log-probabilities."""
        mean, log_std = self.net(obs).chunk(2, dim=1)
        return squash(mean, log_std, noise)


class Agent:
    """Policy, twin critics and temperature. `learn` neither waits for the device nor moves a tensor.

    Several learners draw the same batch, and each works out the gradient of its share of the rows.
    """

    METRICS = ("critic_loss", "actor_loss", "q_mean", "entropy", "temperature")

    def __init__(self, spec: ActorSpec, config: SACConfig, seed: int, device: torch.device, peers: Peers | None = None):
        self._peers = peers or Alone()
        self._share = 1 / self._peers.count  # of the rows of the last batch
        self._config = config
        self._device = device
        num_actions = len(spec.low)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.soft_policy = SoftPolicy(spec)
            critics = StackedMLP(2, (spec.obs_size + num_actions, *spec.hidden_sizes, 1), torch.relu)
        self.soft_policy.to(device)
        self._critics = critics.to(device)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        self._actor_weights, self._critic_weights = share_one_buffer(self.soft_policy), share_one_buffer(self._critics)
        self._target_weights = share_one_buffer(self._targets).requires_grad_(False)
        on_gpu = device.type == "cuda"
        self._actor_optimizer, self._critic_optimizer = (
            torch.optim.Adam([weights], config.learning_rate, fused=True, capturable=on_gpu)
            for weights in (self._actor_weights, self._critic_weights)
        )
        self._target_entropy = -float(num_actions) if config.target_entropy is None else config.target_entropy
        self._num_actions = num_actions
        self.generator = torch.Generator(device).manual_seed(seed)
        self._sums = torch.zeros(len(self.METRICS) + 1, device=device)
        acceleration = choose(config.acceleration, device)
        self._act = fused(self._act_and_look_ahead, acceleration)
        self._critic_loss = fused(self._loss_of_critics, acceleration)
        self._actor_loss = fused(self._loss_of_actor, acceleration)

    def learn(self, draw: Draw) -> Tensor:
        """One gradient step of everything; returns the TD errors."""
        num_rows = len(draw.steps.reward)
        noise = torch.randn((2 * num_rows, self._num_actions), generator=self.generator, device=self._device)
        if self._peers.count > 1:
            draw, noise = self._share_of(draw, noise)
        steps = draw.steps
        action, log_prob, target = self._act(steps, noise)
        critic_loss, td_error = self._critic_loss(steps.obs, steps.action, target, draw.weight)
        self._step(critic_loss, list(self._critics.parameters()), self._critic_weights, self._critic_optimizer)
        self._target_weights.lerp_(self._critic_weights.detach(), self._config.target_rate)

        actor_loss, to_log_temperature, measured = self._actor_loss(steps.obs, action, log_prob, critic_loss.detach())
        parameters = list(self.soft_policy.net.parameters())
        self._step(actor_loss, parameters, self._actor_weights, self._actor_optimizer, first=to_log_temperature)
        self._sums += measured
        if self._config.replay == "prioritised":
            td_error = whole(self._peers, td_error, num_rows)
        return td_error

    def _share_of(self, draw: Draw, noise: Tensor) -> tuple[Draw, Tensor]:
        num_rows = len(draw.steps.reward)
        mine = portion(self._peers, num_rows)
        self._share = (mine.stop - mine.start) / num_rows
        steps = Steps(*(part[mine] for part in draw.steps))
        ends = noise.view(2, num_rows, -1)[:, mine].reshape(2 * len(steps.reward), -1)
        return Draw(steps, draw.weight[mine], draw.rows), ends

    def _act_and_look_ahead(self, steps: Steps, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions where the steps begin, and what the critics should say there; one pass serves both ends of a step."""
        num_rows = len(steps.reward)
        action, log_prob = self.soft_policy(torch.cat([steps.obs, steps.next_obs]), noise)
        with torch.no_grad():
            value = self._value(self._targets, steps.next_obs, action[num_rows:]).amin(dim=0)
            later = value - self.soft_policy.log_temperature.exp() * log_prob[num_rows:]
            target = steps.reward + self._config.gamma * (1 - steps.terminated) * later
        return action[:num_rows], log_prob[:num_rows], target

    def _loss_of_critics(self, obs: Tensor, action: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        error = self._value(self._critics, obs, action) - target
        return 0.5 * (weight * error.square().sum(dim=0)).mean(), error.detach().mean(dim=0)

    def _loss_of_actor(
        self, obs: Tensor, action: Tensor, log_prob: Tensor, critic_loss: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The actor's loss, the gradient of the temperature's (which is linear in its logarithm), and the metrics."""
        temperature = self.soft_policy.log_temperature.detach().exp()
        value = self._value(self._critics, obs, action).amin(dim=0)
        loss = (temperature * log_prob - value).mean()
        entropy = -log_prob.detach().mean()
        measured = (critic_loss, loss.detach(), value.detach().mean(), entropy, temperature, torch.ones_like(entropy))
        return loss, entropy - self._target_entropy, torch.stack(measured)

    @staticmethod
    def _value(critics: StackedMLP, obs: Tensor, action: Tensor) -> Tensor:
        """Of both critics: [2, B]."""
        x = torch.cat([obs, action], dim=1)
        values: Tensor = critics(x.expand(2, *x.shape)).squeeze(-1)
        return values

    def _step(
        self,
        loss: Tensor,
        parameters: Sequence[Tensor],
        weights: nn.Parameter,
        optimizer: torch.optim.Optimizer,
        first: Tensor | None = None,
    ) -> None:
        """Gradients end to end in one buffer, then Adam in one kernel."""
        gradients = [gradient.reshape(-1) for gradient in torch.autograd.grad(loss, parameters)]
        assert weights.grad is not None
        torch.cat([first.reshape(1), *gradients] if first is not None else gradients, out=weights.grad)
        average(self._peers, weights.grad, self._share)
        weights.grad.nan_to_num_(0.0, 0.0, 0.0)  # the losses tell; the weights stay whole
        optimizer.step()

    def td_error(self, steps: Steps) -> Tensor:
        """How far the critics are off, per step, without learning from it."""
        with torch.no_grad():
            noise = torch.zeros((2 * len(steps.reward), self._num_actions), device=self._device)
            _, _, target = self._act_and_look_ahead(steps, noise)
            return (self._value(self._critics, steps.obs, steps.action) - target).mean(dim=0)

    @property
    def weights(self) -> Tensor:
        """The policy's, and the temperature, end to end."""
        return self._actor_weights

    def export(self, policy: MLPActor) -> None:
        """Copy the policy's weights into the workers' actor."""
        weights = dict(self.soft_policy.net.named_parameters())
        policy.load(torch.cat([weights[name].detach().reshape(-1) for name in policy.arrays]).cpu().numpy())

    def metrics(self) -> Metrics:
        """Means over the gradient steps since the last call."""
        average(self._peers, self._sums, self._share)
        *sums, count = self._sums.tolist()
        self._sums.zero_()
        return {name: total / count for name, total in zip(self.METRICS, sums, strict=True)} if count else {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "actor": self._actor_weights.detach(),
            "critics": self._critic_weights.detach(),
            "targets": self._target_weights.detach(),
            "actor_optimizer": self._actor_optimizer.state_dict(),
            "critic_optimizer": self._critic_optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, weights in (
            ("actor", self._actor_weights),
            ("critics", self._critic_weights),
            ("targets", self._target_weights),
        ):
            weights.data.copy_(state[name])
        self._actor_optimizer.load_state_dict(copy.deepcopy(state["actor_optimizer"]))
        self._critic_optimizer.load_state_dict(copy.deepcopy(state["critic_optimizer"]))
        self.generator.set_state(state["generator"].cpu())
