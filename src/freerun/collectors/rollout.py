"""Environments and a policy turned into segments. The only caller of `env.step` in a run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from freerun.core import (
    Array,
    FloatArray,
    Policy,
    Segment,
    UserError,
    VectorEnv,
    episode_rng,
    episode_seed,
)

FIRST_CAPACITY = 128
NOISE_BLOCK_STEPS = 64


class Episode:
    """One lane's episode while it is being recorded."""

    def __init__(self, number: int, lane: int, run_seed: int, policy: Policy, version: int, first_obs: Array):
        self.number = number
        self.lane = lane
        self.num_steps = 0
        self._run_seed = run_seed
        self._rng = episode_rng(run_seed, number)
        self._policy = policy
        self._version = version
        self._started = time.perf_counter()
        self._obs = np.empty((FIRST_CAPACITY, *first_obs.shape), first_obs.dtype)
        self._obs[0] = first_obs
        self._actions: list[Array] = []
        self._log_probs: list[float] = []
        self._rewards: list[float] = []

    def noise(self) -> FloatArray:
        """The noise for the next action, shaped [1, ...]."""
        row = self.num_steps % NOISE_BLOCK_STEPS
        if row == 0:
            self._noise = self._policy.draw(self._rng, NOISE_BLOCK_STEPS)
        return self._noise[row : row + 1]

    def add(self, action: Array, log_prob: float, reward: float, next_obs: Array) -> None:
        self._actions.append(action)
        self._log_probs.append(log_prob)
        self._rewards.append(reward)
        self.num_steps += 1
        if self.num_steps == len(self._obs):
            self._obs = np.concatenate([self._obs, np.empty_like(self._obs)])
        self._obs[self.num_steps] = next_obs

    def finish(self, terminated: bool, truncated: bool) -> Segment:
        steps = self.num_steps
        reward = np.array(self._rewards, np.float32)
        self._check_finite("observation", self._obs[: steps + 1])
        self._check_finite("reward", reward)
        ends = np.zeros((2, steps, 1), np.bool_)
        ends[0, -1], ends[1, -1] = terminated, truncated
        return Segment(
            obs=self._obs[:steps, None],
            action=np.array(self._actions)[:, None],
            log_prob=np.array(self._log_probs, np.float32)[:, None],
            reward=reward[:, None],
            terminated=ends[0],
            truncated=ends[1],
            next_obs=self._obs[1 : steps + 1, None],
            version=np.full((steps, 1), self._version),
            episode=np.full((steps, 1), self.number),
            seconds=time.perf_counter() - self._started,
        )

    def _check_finite(self, name: str, array: Array) -> None:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            step = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
            seed = episode_seed(self._run_seed, self.number)
            raise UserError(
                f"the environment returned a {name} that is not finite at step {step} of episode {self.number} "
                f"(seed {seed}): mend it, or look for the cause with `freerun check-env`"
            )


class Rollout:
    """Runs whole episodes in the lanes of a vector environment; a lane that is free takes the next episode."""

    def __init__(self, env: VectorEnv, policy: Policy, run_seed: int):
        self._env = env
        self._policy = policy
        self._run_seed = run_seed
        self._version = 0

    def load(self, weights: FloatArray, version: int) -> None:
        self._policy.load(weights)
        self._version = version

    def run(self, episodes: Iterator[int]) -> Iterator[Segment]:
        """Run these episodes and hand each over as it ends."""
        lanes: list[Episode | None] = [None] * self._env.num_envs
        padded = np.zeros((len(lanes), *self._env.spec.action_shape), self._env.spec.action_space.dtype)
        obs = np.empty(0)
        running: list[Episode] = []
        rows: list[int] | slice = slice(None)
        while True:
            if len(running) < len(lanes):
                obs = self._begin(episodes, lanes, obs)
                running = [episode for episode in lanes if episode is not None]
                if not running:
                    return
                rows = slice(None) if len(running) == len(lanes) else [episode.lane for episode in running]
            noise = [episode.noise() for episode in running]
            decision = self._policy.act(obs[rows], noise[0] if len(noise) == 1 else np.concatenate(noise))
            actions = decision.action
            if len(running) < len(lanes):  # lanes at rest get an action too, and ignore it
                padded[rows] = actions
                actions = padded
            obs, final_obs, reward, terminated, truncated = self._env.step(actions)
            for row, episode in enumerate(running):
                lane = episode.lane
                episode.add(decision.action[row], decision.log_prob[row], reward[lane], final_obs[lane])
                if terminated[lane] or truncated[lane]:
                    yield episode.finish(bool(terminated[lane]), bool(truncated[lane]))
                    lanes[lane] = None
            if None in lanes:
                running = [episode for episode in running if lanes[episode.lane] is episode]

    def _begin(self, episodes: Iterator[int], lanes: list[Episode | None], obs: Array) -> Array:
        """Start the next episodes in the lanes that are free."""
        free = [lane for lane, episode in enumerate(lanes) if episode is None]
        numbers = dict(zip(free, episodes))  # noqa: B905 - ends with the shorter: a lane without an episode rests
        if not numbers:
            return obs
        seeds: list[int | None] = [None] * len(lanes)
        for lane, number in numbers.items():
            seeds[lane] = episode_seed(self._run_seed, number)
        obs = self._env.reset(seeds)
        for lane, number in numbers.items():
            lanes[lane] = Episode(number, lane, self._run_seed, self._policy, self._version, obs[lane])
        return obs

    def close(self) -> None:
        self._env.close()
