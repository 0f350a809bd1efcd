"""A policy tried on episodes that nobody learns from."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from freerun.collectors.rollout import Rollout, in_order
from freerun.core import Array, Decision, FloatArray, Metrics, Policy, Segment, VectorEnv

TRIAL_SEED = 1_000_003
"""Added to the run's seed, so that trials meet other episodes than training does."""


class Greedy:
    """A policy that takes the most likely action."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self.weights, self.head_size, self.arrays = policy.weights, policy.head_size, policy.arrays
        self.describe, self.load, self.draw, self.log_prob = policy.describe, policy.load, policy.draw, policy.log_prob

        self.single, self.on = policy.single, policy.on

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        return self._policy.act(obs, None)


def play(env: VectorEnv, policy: Policy, seed: int, num_episodes: int) -> Iterator[Segment]:
    """Episodes as they end; take what you need of one before you ask for the next."""
    yield from Rollout(env, policy, seed).episodes(in_order(range(num_episodes)))


class Trials:
    """Every so many steps of a run, a few episodes with the most likely actions; the learner waits for them."""

    def __init__(
        self, env: VectorEnv, policy: Policy, seed: int, every_steps: int, num_episodes: int, first_step: int = 0
    ):
        self._env = env
        self._newest = policy
        self._policy = copy.deepcopy(policy)
        self._seed = TRIAL_SEED + seed
        self._every_steps = every_steps
        self._num_episodes = num_episodes
        self._next = first_step - first_step % every_steps + every_steps
        self._latest: Metrics = {}

    def read(self, step: int) -> Metrics:
        """The mean return of the newest trial, which is due or was."""
        if step >= self._next:
            self._next = step - step % self._every_steps + self._every_steps
            self._policy.load(self._newest.weights)
            episodes = play(self._env, Greedy(self._policy), self._seed, self._num_episodes)
            returns = [float(segment.reward.sum()) for segment in episodes]
            self._latest = {"eval_step": float(step), "eval_return": sum(returns) / len(returns)}
        return self._latest

    def close(self) -> None:
        self._env.close()
