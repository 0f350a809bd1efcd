"""What off-policy algorithms share: a buffer of real steps, an agent, and a declared pace of gradient steps."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from freerun.algorithms.learners.fast_learner import learner_words, uses_fast_learner
from freerun.algorithms.learners.shared_update import first_episode
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.sac.n_step_returns import n_step_returns
from freerun.algorithms.sac.off_policy_config import OffPolicyConfig, pace_words
from freerun.algorithms.sac.replay_buffer import ReplayBuffer, ReplaySample, StepBatch
from freerun.core import (
    AnySegment,
    Array,
    ComputedBy,
    Demand,
    EnvSpec,
    LearnerGroup,
    Metrics,
    Segment,
    SingleLearner,
    UserError,
)
from freerun.cuda_graphs import GraphedStep, resolve_acceleration


def learner_note(config: OffPolicyConfig, device: str) -> str:
    """What a run learns with, for its header."""
    return f"{pace_words(config)} · {learner_words(uses_fast_learner(config.learner, device))}"


def computed_by(config: OffPolicyConfig, device: str) -> ComputedBy:
    return "numpy" if device == "cpu" and uses_fast_learner(config.learner, device) else "torch"


class UpdateBudget:
    """Work that real steps pay for, at a declared ratio: no mode changes how much is learned from each step."""

    def __init__(self, per_step: float):
        self.per_step = per_step
        self._due = 0.0
        self.done = 0

    def earn(self, num_steps: int) -> None:
        self._due += num_steps * self.per_step

    def take(self, at_least: int = 0) -> int:
        """The whole units of work that are due now. What `at_least` takes beyond them is deducted from later ones."""
        # The margin keeps a sum of fractions such as 10 * 0.1 from falling short of a whole number.
        units = max(at_least, int(self._due + 1e-6))
        self._due -= units
        self.done += units
        return units

    def state_dict(self) -> dict[str, float]:
        return {"due": self._due, "done": self.done}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._due, self.done = float(state["due"]), int(state["done"])


class Agent(Protocol):
    """The networks of an algorithm, and the gradient steps that train them."""

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """All that a gradient step draws random numbers from, besides the buffer's own."""
        ...

    def learn(self, sample: ReplaySample) -> Tensor:
        """Take one gradient step; returns the TD errors of the sample."""
        ...

    def td_error(self, steps: StepBatch) -> Tensor:
        """How far the values are off, per step, without learning from it."""
        ...

    def metrics(self) -> Metrics:
        """Means over the gradient steps since the last call."""
        ...

    def export(self, policy: MLPActor, **statistics: Tensor) -> None:
        """Copy the weights, and other numbers of the policy by name, into the workers' policy."""
        ...

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimisers by their names in `state_dict()`."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


CRITIC_PARTS = ("agent/critics", "agent/targets")
"""The parts of an actor-critic agent that judge actions, as paths in its state."""


class OffPolicy(abc.ABC):
    """An algorithm that learns many times from the steps in a replay buffer.

    Every one of several learners stores the steps of all: a step is small beside the gradients that it takes part in.
    """

    learned: ClassVar[tuple[str, ...]] = ("agent/actor", *CRITIC_PARTS)
    """MBPO's model is left out: it describes the other run's environment, and is soon learned from this run's steps."""
    agent: Agent

    def __init__(
        self,
        env: EnvSpec,
        config: OffPolicyConfig,
        seed: int,
        device: str,
        deterministic: bool,
        learner_group: LearnerGroup | None = None,
    ):
        self.config = config
        self._learner_group = learner_group or SingleLearner()
        self._require_shares(config.rows_per_batch, "--batch-size")
        self.device = torch.device(device)
        self._acceleration = resolve_acceleration(config.acceleration, self.device)
        self.spec = self._make_spec(env)
        self.policy = MLPActor(self.spec, bool(self.spec.categories), batch_invariant=deterministic)
        self._whole_episodes = deterministic
        self.agent = self._make_agent(seed)
        if self._learner_group.count > 1 and self._acceleration != "none":
            raise UserError("several learners cannot record their gradient steps: give --acceleration none")
        self._sizes = (self.spec.row_size, self.spec.gaussian_size or len(self.spec.categories))
        self.real_buffer = ReplayBuffer(config.buffer_size, *self._sizes, config, seed, self.device, self._acceleration)
        low, high = (torch.tensor(limits, device=self.device) for limits in (self.spec.low, self.spec.high))
        self._centre, self._half_range = (high + low) / 2, (high - low) / 2
        self._agent_budget = UpdateBudget(config.work_per_step("updates_per_step"))
        self._num_new_steps = 0  # since the last update
        self._last_report = (time.perf_counter(), 0)
        self._export()

    def _make_spec(self, env: EnvSpec) -> ActorSpec:
        return ActorSpec.squashed(env, self.config.hidden_sizes, self.config.activation)

    @abc.abstractmethod
    def _make_agent(self, seed: int) -> Agent: ...

    def _export(self) -> None:
        """Copy what was learned into the workers' policy."""
        self.agent.export(self.policy)

    def _require_shares(self, batch_size: int, flag: str) -> None:
        """Refuse batches that are too small to give every learner a row."""
        count = self._learner_group.count
        if count > batch_size:
            raise UserError(f"{count} learners need batches of at least as many steps: raise {flag}")

    def reconfigure(self, config: OffPolicyConfig) -> None:
        self.config = config
        self._agent_budget.per_step = config.work_per_step("updates_per_step")

    # ------------------------------------------------------------------------------------------ collecting

    def demand(self) -> Demand:
        per_update = self.config.num_steps_per_update
        # Both must be met: enough new steps for this update, and enough in the buffer to begin at all.
        missing = max(per_update - self._num_new_steps, self.config.learning_starts - self.real_buffer.size)
        return Demand(steps=max(0, missing), whole_episodes=self._whole_episodes, next_steps=per_update)

    def observe(self, segments: Sequence[AnySegment]) -> None:
        for steps, versions in self._steps_of_all_learners(segments):
            self._store(steps, versions)
            self._num_new_steps += len(versions)

    def _store(self, steps: StepBatch, versions: Tensor) -> None:
        """Keep the steps of one segment."""
        self.real_buffer.add(steps, versions)

    def _steps_of_all_learners(self, segments: Sequence[AnySegment]) -> Iterator[tuple[StepBatch, Tensor]]:
        """The steps of all learners, in the order that a single learner would have: by episode."""
        mine = ((self.steps_of(segment), self._versions_of(segment)) for segment in segments)
        if self._learner_group.count == 1:
            yield from mine
            return
        numbers = [first_episode(segment) for segment in segments]
        arrays = [(*(part.cpu().numpy() for part in steps), versions.cpu().numpy()) for steps, versions in mine]
        gathered = self._learner_group.gather(list(zip(numbers, arrays, strict=True)))
        pairs = [pair for pairs_of_one in gathered for pair in pairs_of_one]
        for _, (*parts, versions) in sorted(pairs, key=lambda pair: pair[0]):
            yield StepBatch(*map(self._tensor, parts)), self._tensor(versions)

    def _versions_of(self, segment: AnySegment) -> Tensor:
        if isinstance(segment, Segment):
            return self._tensor(segment.version).flatten()
        return torch.full((segment.num_steps,), segment.version, device=self.device)

    def _tensor(self, array: Array | Tensor) -> Tensor:
        """An array on the device. Torch takes no read-only arrays (those in Ray's object store), so it gets a copy."""
        if isinstance(array, np.ndarray):
            array = torch.from_numpy(np.require(array, requirements=("C", "W")))
        return array.to(self.device)

    def steps_of(self, segment: AnySegment) -> StepBatch:
        """The steps of a segment as flat rows, with actions of a range scaled to [-1, 1]."""
        num_steps = segment.num_steps
        names = ("obs", "action", "reward", "next_obs", "terminated")
        obs, action, reward, next_obs, terminated = (self._tensor(getattr(segment, name)).float() for name in names)
        action = action.reshape(num_steps, -1)
        if self.spec.low:
            # a_scaled = (a - centre) / half_range; rounding may push it past 1
            action = ((action - self._centre) / self._half_range).clamp(-1.0, 1.0)
        return StepBatch(
            obs.reshape(num_steps, -1),
            action,
            reward.reshape(num_steps),
            next_obs.reshape(num_steps, -1),
            terminated.reshape(num_steps),
        )

    def _sum_up_rewards(self, steps: StepBatch, segment: AnySegment, num_steps: int) -> StepBatch:
        """The flat rows of a segment, with the rewards of up to `num_steps` steps summed up."""
        if num_steps == 1:
            return steps
        shape = segment.reward.shape  # [T, B]
        terminated, truncated = (self._tensor(getattr(segment, name)) for name in ("terminated", "truncated"))
        reward, last, lost = n_step_returns(
            steps.reward.view(shape), terminated, truncated, num_steps, self.config.gamma
        )
        # Rows are flat: row t * B + b holds step t of environment b.
        rows = last * shape[1] + torch.arange(shape[1], device=self.device)
        return steps._replace(
            reward=reward.flatten(), next_obs=steps.next_obs[rows.flatten()], terminated=lost.flatten()
        )

    def importance(self, segment: AnySegment) -> float:
        """How much a segment surprises the critics: its mean absolute TD error."""
        return float(self.agent.td_error(self.steps_of(segment)).abs().mean())

    # ------------------------------------------------------------------------------------------ learning

    def _earn_updates(self) -> int:
        """Credit the agent's budget with the new steps, and return their number.

        Steps from before learning started count as one update's at most: otherwise learning would begin with a burst
        of gradient steps on the data of an untrained policy.
        """
        num_steps = self._num_new_steps
        if self._agent_budget.done == 0:
            num_steps = min(num_steps, self.config.num_steps_per_update)
        self._num_new_steps = 0
        self._agent_budget.earn(num_steps)
        return num_steps

    def _base_metrics(self) -> Metrics:
        now, done = time.perf_counter(), self._agent_budget.done
        last_moment, last_done = self._last_report
        self._last_report = (now, done)
        return {
            **self.agent.metrics(),
            "agent_updates": float(done),
            "agent_updates_per_second": (done - last_done) / (now - last_moment),
            "real_data": float(self.real_buffer.size),
            "buffer_percent": 100 * self.real_buffer.size / self.real_buffer.capacity,
        }

    # ------------------------------------------------------------------------------------------ checkpoints

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {f"agent/{name}": optimizer for name, optimizer in self.agent.optimizers().items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "agent": self.agent.state_dict(),
            "real": self.real_buffer.state_dict(),
            "agent_pace": self._agent_budget.state_dict(),
            "fresh_steps": self._num_new_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.agent.load_state_dict(state["agent"])
        self.real_buffer.load_state_dict(state["real"])
        self._agent_budget.load_state_dict(state["agent_pace"])
        self._num_new_steps = int(state["fresh_steps"])
        self._export()


class ReplayLearner(OffPolicy):
    """Learns from the real steps in its buffer alone, by one kind of gradient step."""

    @functools.cached_property
    def take_gradient_steps(self) -> GraphedStep:
        """Call it with the number of gradient steps to take. On a GPU they are replays of one captured graph."""
        generators = (*self.agent.generators, self.real_buffer.generator)
        return GraphedStep(self._gradient_step, self.device, generators, self._acceleration)

    def reconfigure(self, config: OffPolicyConfig) -> None:
        super().reconfigure(config)
        self.take_gradient_steps.forget()  # a captured step would keep its batch size

    def update(self, version: int, progress: float) -> Metrics:
        self._earn_updates()
        self.real_buffer.anneal_beta(progress)
        self.take_gradient_steps(self._agent_budget.take())
        self._export()
        return self._base_metrics()

    def _gradient_step(self) -> None:
        sample = self.real_buffer.sample(self.config.rows_per_batch)
        td_error = self.agent.learn(sample)
        self.real_buffer.update_priorities(sample.rows, td_error)
