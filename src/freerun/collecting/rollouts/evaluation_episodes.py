"""Evaluation: episodes that a policy plays and no learner learns from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.core import (
    Array,
    Decision,
    FloatArray,
    HeldOutSeed,
    MemoryPolicy,
    Metrics,
    Policy,
    Purpose,
    RunSeed,
    Segment,
    VectorEnv,
    as_memory_policy,
)


class GreedyPolicy:
    """A policy that takes the most likely action: it passes no noise on to the policy that it wraps."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self.weights, self.head_size, self.arrays = policy.weights, policy.head_size, policy.arrays
        self.describe, self.load, self.draw, self.log_prob = policy.describe, policy.load, policy.draw, policy.log_prob
        self.single, self.on = policy.single, policy.on

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        return self._policy.act(obs, None)


class GreedyMemoryPolicy(GreedyPolicy):
    """The same for a policy with a memory."""

    def __init__(self, policy: MemoryPolicy):
        super().__init__(policy)
        self.memory_size, self.single_from, self._act_from = policy.memory_size, policy.single_from, policy.act_from

    def act_from(self, obs: Array, noise: FloatArray | None, memory: FloatArray) -> Decision:
        return self._act_from(obs, None, memory)


def greedy(policy: Policy) -> GreedyPolicy:
    """Return a policy that takes the most likely actions of this one."""
    remembering = as_memory_policy(policy)
    return GreedyPolicy(policy) if remembering is None else GreedyMemoryPolicy(remembering)


def play(env: VectorEnv, policy: Policy, seed: RunSeed, num_episodes: int) -> Iterator[Segment]:
    """Yield episodes 0, 1, … of a seed as they end. Take what you need of one before you ask for the next."""
    yield from Rollout(env, policy, seed).episodes(next_from(range(num_episodes)))


class HeldOutEpisodes:
    """Plays the same episodes whenever it is called, and returns their returns. Training never sees their seeds."""

    def __init__(self, env: VectorEnv, seed: int, num_episodes: int):
        self._env = env
        self._seed = HeldOutSeed(seed, Purpose.VALIDATION)
        self._num_episodes = num_episodes

    def __call__(self, policy: Policy) -> list[float]:
        return [float(segment.reward.sum()) for segment in play(self._env, policy, self._seed, self._num_episodes)]

    def close(self) -> None:
        self._env.close()


class PeriodicEvaluation:
    """A gauge that plays a few episodes with the most likely actions every `every_steps` steps of a run.

    The learner waits meanwhile.
    """

    def __init__(
        self,
        episodes: Callable[[Policy], Sequence[float]],
        policy: Policy,
        every_steps: int,
        first_step: int = 0,
        close: Callable[[], None] = lambda: None,
    ):
        """`episodes` plays them with a policy and returns their returns."""
        self._episodes = episodes
        self._learners_policy = policy
        self._policy = copy.deepcopy(policy)  # so that playing leaves no trace in the learner's
        self._every_steps = every_steps
        self._close = close
        # The next multiple of `every_steps`, so that a run that was resumed evaluates at the same steps.
        self._next_step = first_step - first_step % every_steps + every_steps
        self._metrics: Metrics = {}

    def read(self, step: int) -> Metrics:
        """Play the episodes if they are due; return the mean return of the newest evaluation."""
        if step >= self._next_step:
            self._next_step = step - step % self._every_steps + self._every_steps
            self._policy.load(self._learners_policy.weights)
            returns = self._episodes(greedy(self._policy))
            self._metrics = {"eval_step": float(step), "eval_return": sum(returns) / len(returns)}
        return self._metrics

    def close(self) -> None:
        self._close()
