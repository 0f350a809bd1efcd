"""Soft actor-critic (Haarnoja et al. 2018): off-policy, with twin critics and a temperature that tunes itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freerun.algorithms.actor import ActorSpec, MLPActor
from freerun.algorithms.replay import Replay, Steps
from freerun.algorithms.sharing import first_episode
from freerun.algorithms.soft_agent import Agent, SACConfig
from freerun.capture import Repeated, choose
from freerun.core import Alone, AnySegment, Array, Demand, EnvSpec, Metrics, Peers, Segment, UserError


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
