"""Soft actor-critic (Haarnoja et al. 2018): off-policy, with twin critics and a temperature that tunes itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.actor import Activation, ActorSpec, MLPActor
from freerun.algorithms.networks import StackedMLP, mlp, share_one_buffer, squash
from freerun.algorithms.replay import Draw, Replay, ReplayConfig, Steps
from freerun.algorithms.sharing import average, first_episode, portion, whole
from freerun.capture import Repeated, choose, fused
from freerun.core import (
    Acceleration,
    Alone,
    AnySegment,
    Array,
    Demand,
    EnvSpec,
    Metrics,
    Peers,
    Segment,
    UserError,
    require_positive,
)


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


class Pace:
    """Work that falls due with every real step, at a declared ratio: no mode changes how much is learned from each."""

    def __init__(self, per_step: float):
        self.per_step = per_step
        self._due = 0.0
        self.done = 0

    def earn(self, num_steps: int) -> None:
        self._due += num_steps * self.per_step

    def take(self) -> int:
        """The whole pieces of work that are due now."""
        pieces = int(self._due + 1e-6)
        self._due -= pieces
        self.done += pieces
        return pieces

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due, "done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._due, self.done = float(state["due"]), int(state["done"])


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


class OffPolicy:
    """What SAC and MBPO share: a buffer of real steps, an agent, and gradient steps at a declared pace.

    Each of several learners keeps the steps of all: a step is small beside the gradients that it takes part in.
    """

    def __init__(
        self, env: EnvSpec, config: SACConfig, seed: int, device: str, deterministic: bool, peers: Peers | None = None
    ):
        self.config = config
        self._peers = peers or Alone()
        for name in ("batch_size", "model_batch_size"):
            if self._peers.count > getattr(config, name, config.batch_size):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{self._peers.count} learners need batches of at least as many steps: raise {flag}")
        self.spec = ActorSpec.squashed(env, config.hidden_sizes, config.activation)
        self.policy = MLPActor(self.spec, scalar_actions=False, batch_invariant=deterministic)
        self._device = torch.device(device)
        self._whole_episodes = deterministic
        self._agent = Agent(self.spec, config, seed, self._device, self._peers)
        sizes = (self.spec.obs_size, self.spec.gaussian_size)
        acceleration = choose(config.acceleration, self._device)
        if self._peers.count > 1 and acceleration != "none":
            raise UserError("several learners cannot record their gradient steps: give --acceleration none")
        self._real = Replay(config.buffer_size, *sizes, config, seed, self._device, acceleration)
        low, high = (torch.tensor(limits, device=self._device) for limits in (self.spec.low, self.spec.high))
        self._centre, self._reach = (high + low) / 2, (high - low) / 2
        self._agent_pace = Pace(config.updates_per_step)
        self._fresh_steps = 0
        self._last_report = (time.perf_counter(), 0)
        self._agent.export(self.policy)

    def reconfigured(self) -> None:
        """Some of the settings have changed between two updates."""
        self._agent_pace.per_step = self.config.updates_per_step

    def demand(self) -> Demand:
        per_update = self.config.steps_per_update or self.config.default_steps_per_update
        missing = max(per_update - self._fresh_steps, self.config.learning_starts - self._real.size)
        return Demand(steps=max(0, missing), whole_episodes=self._whole_episodes, next_steps=per_update)

    def observe(self, segments: Sequence[AnySegment]) -> None:
        for steps, versions in self._of_all(segments):
            self._real.add(steps, versions)
            self._fresh_steps += len(versions)

    def _of_all(self, segments: Sequence[AnySegment]) -> Iterator[tuple[Steps, Tensor]]:
        """The steps of all learners, in the order in which one would have them: by episode."""
        mine = ((self._steps(segment), self._versions(segment)) for segment in segments)
        if self._peers.count == 1:
            yield from mine
            return
        numbers = [first_episode(segment) for segment in segments]
        arrays = [(*(part.cpu().numpy() for part in steps), versions.cpu().numpy()) for steps, versions in mine]
        found = [part for parts in self._peers.gather(list(zip(numbers, arrays, strict=True))) for part in parts]
        for _, (*parts, versions) in sorted(found, key=lambda part: part[0]):
            yield Steps(*map(self._tensor, parts)), self._tensor(versions)

    def _versions(self, segment: AnySegment) -> Tensor:
        if isinstance(segment, Segment):
            return self._tensor(segment.version).flatten()
        return torch.full((segment.num_steps,), segment.version, device=self._device)

    def _tensor(self, array: Array | Tensor) -> Tensor:
        """Arrays that lie in Ray's object store cannot be written, and torch takes none of those: it gets a copy."""
        if isinstance(array, np.ndarray):
            array = torch.from_numpy(np.require(array, requirements=("C", "W")))
        return array.to(self._device)

    def _steps(self, segment: AnySegment) -> Steps:
        num_steps = segment.num_steps
        names = ("obs", "action", "reward", "next_obs", "terminated")
        obs, action, reward, next_obs, terminated = (self._tensor(getattr(segment, name)).float() for name in names)
        scaled = ((action.reshape(num_steps, -1) - self._centre) / self._reach).clamp(-1.0, 1.0)
        return Steps(
            obs.reshape(num_steps, -1),
            scaled,
            reward.reshape(num_steps),
            next_obs.reshape(num_steps, -1),
            terminated.reshape(num_steps),
        )

    def importance(self, segment: AnySegment) -> float:
        """How surprising a segment is to the critics: its mean absolute TD error."""
        return float(self._agent.td_error(self._steps(segment)).abs().mean())

    def _earn(self) -> int:
        """What the new steps are worth; those before learning started are worth no more than one update's."""
        num_steps = self._fresh_steps
        if self._agent_pace.done == 0:
            num_steps = min(num_steps, self.config.steps_per_update or self.config.default_steps_per_update)
        self._fresh_steps = 0
        self._agent_pace.earn(num_steps)
        return num_steps

    def _base_metrics(self) -> Metrics:
        now, done = time.perf_counter(), self._agent_pace.done
        last_moment, last_done = self._last_report
        self._last_report = (now, done)
        return {
            **self._agent.metrics(),
            "agent_updates": float(done),
            "agent_updates_per_second": (done - last_done) / (now - last_moment),
            "real_data": float(self._real.size),
            "buffer_percent": 100 * self._real.size / self._real.capacity,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "agent": self._agent.state_dict(),
            "real": self._real.state_dict(),
            "agent_pace": self._agent_pace.state_dict(),
            "fresh_steps": self._fresh_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._agent.load_state_dict(state["agent"])
        self._real.load_state_dict(state["real"])
        self._agent_pace.load_state_dict(state["agent_pace"])
        self._fresh_steps = int(state["fresh_steps"])
        self._agent.export(self.policy)


class SAC(OffPolicy):
    """Learns from the steps in its buffer."""

    def __init__(
        self, env: EnvSpec, config: SACConfig, seed: int, device: str, deterministic: bool, peers: Peers | None = None
    ):
        super().__init__(env, config, seed, device, deterministic, peers)
        generators = (self._agent.generator, self._real.generator)
        acceleration = choose(config.acceleration, self._device)
        self._learn = Repeated(self._learn_once, self._device, generators, acceleration)

    def reconfigured(self) -> None:
        super().reconfigured()
        self._learn.forget()

    def _learn_once(self) -> None:
        draw = self._real.draw(self.config.batch_size)
        self._real.prioritise(draw.rows, self._agent.learn(draw))

    def update(self, version: int, progress: float) -> Metrics:
        self._earn()
        self._learn(self._agent_pace.take())
        self._agent.export(self.policy)
        return self._base_metrics()
