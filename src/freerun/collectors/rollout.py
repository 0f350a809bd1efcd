"""Environments and a policy turned into segments. The only caller of `env.step`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from freerun.core import (
    Array,
    EnvSpec,
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

    def __init__(self, number: int, run_seed: int, policy: Policy, spec: EnvSpec, first_obs: Array):
        self.number = number
        self.seed = episode_seed(run_seed, number)
        self.num_steps = 0
        self._rng = episode_rng(run_seed, number)
        self._policy = policy
        self._noise: FloatArray | None = None
        self._started = time.perf_counter()
        self._capacity = FIRST_CAPACITY
        space = spec.action_space
        self._obs = np.empty((FIRST_CAPACITY + 1, *first_obs.shape), first_obs.dtype)
        self._action = np.empty((FIRST_CAPACITY, *space.shape), space.dtype)
        self._log_prob = np.empty(FIRST_CAPACITY, np.float32)
        self._reward = np.empty(FIRST_CAPACITY, np.float32)
        self._version = np.empty(FIRST_CAPACITY, np.int64)
        self._obs[0] = first_obs

    def noise(self) -> FloatArray:
        row = self.num_steps % NOISE_BLOCK_STEPS
        if row == 0:
            self._noise = self._policy.draw(self._rng, NOISE_BLOCK_STEPS)
        assert self._noise is not None
        return self._noise[row]  # type: ignore[no-any-return]

    def add(self, action: Array, log_prob: float, reward: float, next_obs: Array, version: int) -> None:
        step = self.num_steps
        if step == self._capacity:
            self._grow()
        self._action[step] = action
        self._log_prob[step] = log_prob
        self._reward[step] = reward
        self._version[step] = version
        self._obs[step + 1] = next_obs
        self.num_steps = step + 1

    def _grow(self) -> None:
        for name in ("_obs", "_action", "_log_prob", "_reward", "_version"):
            array = getattr(self, name)
            longer = np.empty((len(array) + self._capacity, *array.shape[1:]), array.dtype)
            longer[: len(array)] = array
            setattr(self, name, longer)
        self._capacity *= 2

    def finish(self, terminated: bool, truncated: bool) -> Segment:
        steps = self.num_steps
        self._check_finite("observation", self._obs[: steps + 1])
        self._check_finite("reward", self._reward[:steps])
        ends = np.zeros((2, steps, 1), np.bool_)
        ends[0, -1], ends[1, -1] = terminated, truncated
        return Segment(
            obs=self._obs[:steps, None],
            action=self._action[:steps, None],
            log_prob=self._log_prob[:steps, None],
            reward=self._reward[:steps, None],
            terminated=ends[0],
            truncated=ends[1],
            next_obs=self._obs[1 : steps + 1, None],
            version=self._version[:steps, None],
            episode=np.full((steps, 1), self.number),
            seconds=time.perf_counter() - self._started,
        )

    def _check_finite(self, name: str, array: Array) -> None:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            step = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
            raise UserError(
                f"the environment returned a {name} that is not finite at step {step} of episode {self.number} "
                f"(seed {self.seed}): mend it, or look for the cause with `freerun check-env`"
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
        num_envs = self._env.num_envs
        lanes: list[Episode | None] = [None] * num_envs
        all_lanes = list(range(num_envs))
        obs = np.empty(0)
        space = self._env.spec.action_space
        actions = np.zeros((num_envs, *space.shape), space.dtype)
        while True:
            idle = [lane for lane in all_lanes if lanes[lane] is None]
            if idle:
                obs = self._begin(episodes, idle, lanes, obs)
            active = all_lanes if len(idle) == 0 else [lane for lane in all_lanes if lanes[lane] is not None]
            if not active:
                return
            running = [episode for episode in lanes if episode is not None]
            noise = np.stack([episode.noise() for episode in running])
            decision = self._policy.act(obs if len(active) == num_envs else obs[active], noise)
            actions[active] = decision.action
            result = self._env.step(actions)
            obs = result.obs
            for row, (lane, episode) in enumerate(zip(active, running, strict=True)):
                episode.add(
                    decision.action[row],
                    decision.log_prob[row],
                    result.reward[lane],
                    result.final_obs[lane],
                    self._version,
                )
                if result.terminated[lane] or result.truncated[lane]:
                    yield episode.finish(bool(result.terminated[lane]), bool(result.truncated[lane]))
                    lanes[lane] = None

    def _begin(self, episodes: Iterator[int], idle: list[int], lanes: list[Episode | None], obs: Array) -> Array:
        numbers = dict(zip(idle, episodes))  # noqa: B905 - ends with the shorter: lanes without an episode rest
        if not numbers:
            return obs
        seeds: list[int | None] = [None] * len(lanes)
        for lane, number in numbers.items():
            seeds[lane] = episode_seed(self._run_seed, number)
        obs = self._env.reset(seeds)
        for lane, number in numbers.items():
            lanes[lane] = Episode(number, self._run_seed, self._policy, self._env.spec, obs[lane])
        return obs

    def close(self) -> None:
        self._env.close()
