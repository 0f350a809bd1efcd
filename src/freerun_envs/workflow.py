"""Workflows: an order in which a defender should repair groups of hosts, and a reward for keeping to it.

The order is appended to the observation. *Compliance* is the share of an episode's Remove and Restore actions that were
aimed at the highest-ranked group with a compromised host. Its change, times a weight, is added to the reward. User0 is
always compromised and never counts: otherwise no group ranked below `user` could ever be repaired in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core import Array, FloatArray, UserError, split_seed

NUM_HOSTS = 13
GROUPS: dict[str, tuple[int, ...]] = {
    "defender": (0,),
    "enterprise": (1, 2, 3),
    "op_server": (7,),
    "op_host": (4, 5, 6),
    "user": (8, 9, 10, 11, 12),
}
"""The hosts of each group, by their place in the observation."""
ALWAYS_COMPROMISED = 8  # User0
# As CAGE 2 numbers them: 2 + 13 Analyse = 15, then 13 Remove and 8 × 13 decoys = 132.
FIRST_REMOVE, FIRST_RESTORE = 15, 132
"""The actions from these numbers on remove red from hosts 0 to 12, or restore them."""
SEPARATOR = ";"
"""Between several orders in one text."""
DEFAULT_COMPLIANCE_WEIGHT = 10.0


def read_order(text: str) -> tuple[str, ...]:
    """Parse an order of all five groups: their names, separated by commas."""
    order = tuple(name.strip() for name in text.split(","))
    if sorted(order) != sorted(GROUPS):
        raise UserError(f"--workflow {text!r} must name each of {', '.join(GROUPS)} once, the first to repair first")
    return order


def one_hot(order: Sequence[str]) -> FloatArray:
    """The order as 25 numbers: for each rank, a one-hot code of the group that has it."""
    places = np.zeros((len(GROUPS), len(GROUPS)), np.float32)
    for rank, name in enumerate(order):
        places[rank, list(GROUPS).index(name)] = 1.0
    return places.reshape(-1)


def repaired_host(action: int) -> int | None:
    """The host that an action removes red from, or restores; None for other actions."""
    for first in (FIRST_REMOVE, FIRST_RESTORE):
        if first <= action < first + NUM_HOSTS:
            return action - first
    return None


class Compliance:
    """The compliance of one episode with an order."""

    def __init__(self, order: Sequence[str]):
        self._ranked = [GROUPS[name] for name in order]
        self._num_repairs = 0
        self._num_in_order = 0

    @property
    def share(self) -> float:
        """Repairs in order / all repairs; 1 before the first repair."""
        return self._num_in_order / self._num_repairs if self._num_repairs else 1.0

    def add(self, action: int, status: Array) -> None:
        """Count an action, given the status of the hosts before it. If no host is compromised, it does not count."""
        host = repaired_host(action)
        if host is None:
            return
        for group in self._ranked:
            if any(status[member] for member in group if member != ALWAYS_COMPROMISED):
                self._num_repairs += 1
                self._num_in_order += host in group
                return


class WorkflowEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment under one of several orders: the seed of a reset says which one (`core.split_seed`).

    Training k of a series serves order k modulo the number of orders, so an order may be trained again later.
    """

    def __init__(self, env_id: str, workflows: str, compliance_weight: float, **env_args: Any):
        """The environment must have `host_status()`: for each of the 13 hosts, 0 where red has no session."""
        env = gymnasium.make(env_id, disable_env_checker=True, **env_args)
        if not hasattr(env.unwrapped, "host_status"):
            raise UserError(f"--workflow is for cyber-defence environments, which {env_id!r} is not")
        super().__init__(env)
        self._simulator: Any = env.unwrapped
        self._orders = [read_order(text) for text in workflows.split(SEPARATOR)]
        self._codes = [one_hot(order) for order in self._orders]
        self.weight = compliance_weight
        self._order = 0
        self.compliance = Compliance(self._orders[0])
        inner = env.observation_space
        assert isinstance(inner, spaces.Box)
        shape = (inner.shape[0] + len(self._codes[0]),)
        self.observation_space = spaces.Box(0.0, max(1.0, float(inner.high.max())), shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        if seed is not None:
            training, seed = split_seed(seed)
            self._order = training % len(self._orders)
        self.compliance = Compliance(self._orders[self._order])
        obs, info = self.env.reset(seed=seed, options=options)
        self._status = self._simulator.host_status().copy()
        return self._extend(obs), info

    def step(self, action: Any) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        before = self.compliance.share
        # With the status from before the action: blue is judged by what there was to repair.
        self.compliance.add(int(action), self._status)
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._status = self._simulator.host_status().copy()
        # Shaped reward: r + weight * (compliance after the action - compliance before it)
        shaped = float(reward) + self.weight * (self.compliance.share - before)
        return self._extend(obs), shaped, terminated, truncated, {**info, "environment_reward": float(reward)}

    def _extend(self, obs: Any) -> FloatArray:
        return np.concatenate([np.asarray(obs, np.float32), self._codes[self._order]])
