"""PPO in one file, in the manner that CleanRL made popular: environments stepped in turn, one loop, nothing hidden.

A yardstick for the benchmarks: it shares no code with freerun. `python benchmarks/single_file_ppo.py --env CartPole-v1`
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

RECENT_EPISODES = 100
NORMALIZED_LIMIT = 10.0


@dataclass(frozen=True)
class Arguments:
    """What is learned, and how."""

    env: str = "CartPole-v1"
    """A Gymnasium id."""
    seed: int = 0
    """Seeds networks, environments and actions."""
    total_steps: int = 100_000
    """Environment steps, rounded up to whole updates."""
    num_envs: int = 8
    """Environments, stepped one after another."""
    steps_per_update: int = 2048
    """Steps that each update learns from, over all environments."""
    minibatch_size: int = 64
    """Steps per gradient step."""
    num_epochs: int = 10
    """Passes over the data of an update."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """0 trusts the value function, 1 the returns."""
    clip_range: float = 0.2
    """How far the probability of an action may move in one update."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    normalize_obs: bool = False
    """Scale observations by their running mean and deviation."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""
    initial_log_std: float = 0.0
    """Logarithm of the deviation of continuous actions before anything is learned."""

    def __post_init__(self) -> None:
        if self.steps_per_update % self.num_envs:
            raise SystemExit("--steps-per-update must be a multiple of --num-envs")


@dataclass(frozen=True)
class Progress:
    """Where a run stands after an update."""

    step: int
    episodes: int
    return_mean: float
    """Over the last 100 episodes; NaN before the first."""


class Moments:
    """Mean and variance of all rows so far; each batch is merged into them."""

    def __init__(self, shape: tuple[int, ...]):
        self.count, self.mean, self.variance = 1e-4, np.zeros(shape), np.ones(shape)

    def update(self, rows: NDArray[Any]) -> None:
        total = self.count + len(rows)
        shift = rows.mean(axis=0) - self.mean
        spread = self.variance * self.count + rows.var(axis=0) * len(rows)
        self.variance = (spread + shift**2 * self.count * len(rows) / total) / total
        self.mean = self.mean + shift * len(rows) / total
        self.count = total

    @property
    def deviation(self) -> NDArray[np.float64]:
        return np.sqrt(self.variance + 1e-8)


class Agent(nn.Module):
    """A policy and a value function, two hidden layers of 64 each."""

    def __init__(self, obs_size: int, action_space: spaces.Discrete | spaces.Box, initial_log_std: float):
        super().__init__()
        self.discrete = isinstance(action_space, spaces.Discrete)
        num_outputs = (
            int(action_space.n) if isinstance(action_space, spaces.Discrete) else math.prod(action_space.shape)
        )
        self.actor = layers((obs_size, 64, 64, num_outputs), output_gain=0.01)
        self.critic = layers((obs_size, 64, 64, 1), output_gain=1.0)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((num_outputs,), initial_log_std))

    def policy(self, obs: Tensor) -> Distribution:
        output = self.actor(obs)
        if self.discrete:
            return Categorical(logits=output, validate_args=False)
        return Independent(Normal(output, self.log_std.exp(), validate_args=False), 1, validate_args=False)

    def value(self, obs: Tensor) -> Tensor:
        value: Tensor = self.critic(obs).squeeze(-1)
        return value


def layers(sizes: tuple[int, ...], output_gain: float) -> nn.Sequential:
    modules: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(sizes):
        linear = nn.Linear(num_in, num_out)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        modules += [linear, nn.Tanh()]
    last = modules[-2]
    assert isinstance(last, nn.Linear)
    nn.init.orthogonal_(last.weight, output_gain)
    return nn.Sequential(*modules[:-1])


# ---------------------------------------------------------------------------------------------- collecting


@dataclass
class Rollout:
    """What an update learns from: arrays [T, B, ...]."""

    obs: NDArray[np.float32]
    action: NDArray[Any]
    log_prob: NDArray[np.float32]
    value: NDArray[np.float32]
    reward: NDArray[np.float32]
    """Scaled; where an episode was cut off, with the discounted value of what would have followed."""
    ended: NDArray[np.bool_]


class Environments:
    """Steps all environments together and keeps the books of their episodes."""

    def __init__(self, arguments: Arguments):
        self._arguments = arguments
        self.envs = SyncVectorEnv(
            [lambda: gymnasium.make(arguments.env)] * arguments.num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )
        obs_space, action_space = self.envs.single_observation_space, self.envs.single_action_space
        assert isinstance(obs_space, spaces.Box)
        assert isinstance(action_space, spaces.Discrete | spaces.Box)
        self.obs_shape, self.action_space = obs_space.shape, action_space
        self.episodes = 0
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._returns, self._discounted = np.zeros(arguments.num_envs), np.zeros(arguments.num_envs)
        self._obs_moments, self._return_moments = Moments(self.obs_shape), Moments(())

    def reset(self) -> NDArray[np.float32]:
        return self._observed(self.envs.reset(seed=self._arguments.seed)[0])

    def _observed(self, obs: NDArray[Any], learn: bool = True) -> NDArray[np.float32]:
        if self._arguments.normalize_obs:
            if learn:
                self._obs_moments.update(obs)
            scaled = (obs - self._obs_moments.mean) / self._obs_moments.deviation
            obs = np.clip(scaled, -NORMALIZED_LIMIT, NORMALIZED_LIMIT)
        return obs.astype(np.float32)

    def _scaled(self, reward: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._arguments.normalize_reward:
            return reward
        self._discounted = self._discounted * self._arguments.gamma + reward
        self._return_moments.update(self._discounted)
        return np.clip(reward / self._return_moments.deviation, -NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def step(self, action: NDArray[Any], agent: Agent) -> tuple[NDArray[np.float32], Any, NDArray[np.bool_]]:
        """Next observations, rewards to learn from, and where an episode ended."""
        if isinstance(self.action_space, spaces.Box):
            action = np.clip(action, self.action_space.low, self.action_space.high)
        obs, raw_reward, terminated, truncated, infos = self.envs.step(action)
        reward = self._scaled(raw_reward)
        ended = terminated | truncated
        self._returns += raw_reward
        if ended.any():
            reward = reward.copy()
            for row in np.flatnonzero(truncated & ~terminated):
                # Cut off, not over: the value of what would have followed counts.
                final_obs = torch.from_numpy(self._observed(infos["final_obs"][row][None], learn=False))
                reward[row] += self._arguments.gamma * float(agent.value(final_obs))
            self.episodes += int(ended.sum())
            self.recent_returns.extend(self._returns[ended].tolist())
            self._returns[ended] = self._discounted[ended] = 0.0
        return self._observed(obs), reward, ended


@torch.no_grad()
def collect(
    environments: Environments, agent: Agent, obs: NDArray[np.float32], num_steps: int
) -> tuple[Rollout, NDArray[np.float32]]:
    """A rollout of that many steps of each environment, and the observations to go on with."""
    rows: list[tuple[Any, ...]] = []
    for _ in range(num_steps):
        obs_tensor = torch.from_numpy(obs)
        policy = agent.policy(obs_tensor)
        action = policy.sample()
        log_prob = policy.log_prob(action)
        next_obs, reward, ended = environments.step(action.numpy(), agent)
        rows.append((obs, action.numpy(), log_prob.numpy(), agent.value(obs_tensor).numpy(), reward, ended))
        obs = next_obs
    rollout = Rollout(*(np.stack(column) for column in zip(*rows, strict=True)))
    rollout.reward = rollout.reward.astype(np.float32)
    return rollout, obs


# ---------------------------------------------------------------------------------------------- learning


def advantages(rollout: Rollout, last_value: NDArray[np.float32], gamma: float, gae_lambda: float) -> NDArray[Any]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16), backwards in time."""
    result = np.zeros_like(rollout.reward)
    running, next_value = np.zeros_like(last_value), last_value
    for step in reversed(range(len(result))):
        goes_on = 1.0 - rollout.ended[step]
        error = rollout.reward[step] + gamma * next_value * goes_on - rollout.value[step]
        running = error + gamma * gae_lambda * goes_on * running
        result[step], next_value = running, rollout.value[step]
    return result


def learn(
    agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, advantage: NDArray[Any], arguments: Arguments
) -> None:
    """Several passes over the rollout in random minibatches, by the clipped objective."""

    def flat(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.reshape(-1, *array.shape[2:]))

    obs, action, old_log_prob = flat(rollout.obs), flat(rollout.action), flat(rollout.log_prob)
    flat_advantage, target = flat(advantage), flat(advantage + rollout.value)
    for _ in range(arguments.num_epochs):
        for rows in torch.randperm(len(obs)).split(arguments.minibatch_size):  # type: ignore[no-untyped-call]
            policy = agent.policy(obs[rows])
            ratio = (policy.log_prob(action[rows]) - old_log_prob[rows]).exp()
            weight = flat_advantage[rows]
            weight = (weight - weight.mean()) / (weight.std() + 1e-8)
            clipped = ratio.clamp(1 - arguments.clip_range, 1 + arguments.clip_range)
            loss = -torch.minimum(ratio * weight, clipped * weight).mean()
            loss = loss + arguments.value_coef * (agent.value(obs[rows]) - target[rows]).square().mean()
            if arguments.entropy_coef:
                loss = loss - arguments.entropy_coef * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(agent.parameters(), arguments.max_grad_norm)
            optimizer.step()


def train(arguments: Arguments, on_start: Callable[[], None], on_update: Callable[[Progress], None]) -> Agent:
    """`on_start` is called when all is built and nothing has been stepped, `on_update` after every update."""
    torch.manual_seed(arguments.seed)
    environments = Environments(arguments)
    agent = Agent(math.prod(environments.obs_shape), environments.action_space, arguments.initial_log_std)
    optimizer = torch.optim.Adam(agent.parameters(), arguments.learning_rate, eps=1e-5)
    on_start()
    obs = environments.reset()
    step = 0
    while step < arguments.total_steps:
        rollout, obs = collect(environments, agent, obs, arguments.steps_per_update // arguments.num_envs)
        with torch.no_grad():
            last_value = agent.value(torch.from_numpy(obs)).numpy()
        advantage = advantages(rollout, last_value, arguments.gamma, arguments.gae_lambda)
        learn(agent, optimizer, rollout, advantage, arguments)
        step += arguments.steps_per_update
        recent = environments.recent_returns
        on_update(Progress(step, environments.episodes, float(np.mean(recent)) if recent else math.nan))
    environments.envs.close()
    return agent


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)
    started = time.perf_counter()

    def show(progress: Progress) -> None:
        seconds = time.perf_counter() - started
        print(
            f"{seconds:6.1f} s  step {progress.step}  episodes {progress.episodes}  return {progress.return_mean:.1f}"
        )

    train(arguments, on_start=lambda: None, on_update=show)


if __name__ == "__main__":
    main()
