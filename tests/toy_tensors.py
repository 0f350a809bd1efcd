"""Tensor environments whose steps are all known in advance."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from freerun.core import EnvSpec, Metrics, ObsGroups, TensorStep, mask_space


class Counting:
    """Environment i has episodes of i + 2 steps; even ones terminate, odd ones are truncated.

    The observation is (i, steps of the episode so far, number of the episode); the reward is the number of the step.
    """

    is_capturable = False

    def __init__(
        self,
        num_envs: int,
        device: str,
        fail_after: int | None,
        reports_final_obs: bool,
        how: str = "raise",
        num_choices: int = 0,
    ):
        """With `num_choices`, actions are discrete."""
        self.spec = EnvSpec(
            spaces.Box(-np.inf, np.inf, (3,), np.float32),
            spaces.Discrete(num_choices) if num_choices else spaces.Box(-1.0, 1.0, (2,), np.float32),
            reports_final_obs,
        )
        self.num_envs, self.device = num_envs, torch.device(device)
        self._index = torch.arange(num_envs, device=self.device)
        self._fail_after, self._how = fail_after, how
        self._num_steps = 0
        self.is_closed = False

    def reset(self) -> Tensor:
        self._step, self._episode = torch.zeros_like(self._index), torch.zeros_like(self._index)
        return self._observe()

    def _observe(self) -> Tensor:
        return torch.stack([self._index, self._step, self._episode], 1).float()

    def step(self, action: Tensor) -> TensorStep:
        self._num_steps += 1
        if self._fail_after is not None and self._num_steps > self._fail_after:
            self._fail()
        self._step = self._step + 1
        final_obs, reward = self._observe(), self._step.float()
        ended = self._step == self._index + 2
        self._step, self._episode = self._step * ~ended, self._episode + ended
        is_even = self._index % 2 == 0
        obs = self._observe()
        if self._how in ("nan once", "nan always") and self._is_bad():
            (reward if self._how == "nan once" else final_obs)[1] = torch.nan
        return TensorStep(
            obs, final_obs if self.spec.reports_final_obs else obs, reward, ended & is_even, ended & ~is_even
        )

    def _is_bad(self) -> bool:
        if self._fail_after is None:
            return False
        return self._num_steps == self._fail_after if self._how == "nan once" else self._num_steps >= self._fail_after

    def _fail(self) -> None:
        if self._how == "raise":
            raise ValueError("the rotor fell off")
        while self._how == "sleep":
            time.sleep(1000)
        if self._how == "lock":  # a deadlock within C, which no signal ends
            c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            c.pthread_mutex_lock(mutex)
            c.pthread_mutex_lock(mutex)

    def metrics(self) -> Metrics:
        return {"simulator/steps": float(self._num_steps)}

    def close(self) -> None:
        self.is_closed = True


def build(
    name: str,
    num_envs: int,
    device: str,
    seed: int,
    fail_after: int | None = None,
    reports_final_obs: bool = True,
    how: str = "raise",
    num_choices: int = 0,
) -> Any:
    return Counting(num_envs, device, fail_after, reports_final_obs, how, num_choices)


class Privileged(Counting):
    """The value function sees the environment's index and step too; the policy sees only the number of the episode."""

    def __init__(self, num_envs: int, device: str):
        super().__init__(num_envs, device, None, reports_final_obs=True)
        vector = functools.partial(spaces.Box, -np.inf, np.inf, dtype=np.float32)
        groups = ObsGroups(vector(shape=(1,)), vector(shape=(2,)))
        self.spec = EnvSpec.of_groups(groups, self.spec.action_space, reports_final_obs=True)

    def _observe(self) -> Tensor:
        return super()._observe()[:, [2, 0, 1]]


def build_privileged(name: str, num_envs: int, device: str, seed: int) -> Privileged:
    return Privileged(num_envs, device)


class Elsewhere(Counting):
    """One of two simulators that are elsewhere. Its first step returns only while the other one makes its first too."""

    is_elsewhere = True
    meeting = threading.Barrier(2, timeout=30)

    def step(self, action: Tensor) -> TensorStep:
        if not hasattr(self, "_has_met"):
            self.meeting.wait()
            self._has_met = True
        return super().step(action)


def build_elsewhere(name: str, num_envs: int, device: str, seed: int) -> Elsewhere:
    return Elsewhere(num_envs, device, None, reports_final_obs=True)


class Masked(Counting):
    """Of three choices, the one whose number is the step modulo 3 is not allowed, and choosing it is counted."""

    def __init__(self, num_envs: int, device: str):
        super().__init__(num_envs, device, None, reports_final_obs=True)
        actions = spaces.Discrete(3)
        groups = ObsGroups(spaces.Box(-np.inf, np.inf, (3,), np.float32), None, mask_space(actions))
        self.spec = EnvSpec.of_groups(groups, actions, reports_final_obs=True)
        self.num_forbidden = 0

    def _observe(self) -> Tensor:
        choices = torch.arange(3, device=self.device)
        return torch.cat([super()._observe(), self._step[:, None] % 3 != choices], dim=1)

    def step(self, action: Tensor) -> TensorStep:
        self.num_forbidden += int((self._step % 3 == action).sum())
        return super().step(action)

    def metrics(self) -> Metrics:
        return {"simulator/forbidden": float(self.num_forbidden)}


def build_masked(name: str, num_envs: int, device: str, seed: int) -> Masked:
    return Masked(num_envs, device)
