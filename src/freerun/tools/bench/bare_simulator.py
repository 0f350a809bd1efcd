"""Measures the bare limit of environments that are tensors: the simulator alone, stepped with random actions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from freerun.adapters.tensor_envs import TensorEnvs
from freerun.collecting.tensors.tensor_rollout import TensorRollout
from freerun.core import EnvSpec, FloatArray
from freerun.settings.defaults import complete
from freerun.settings.factories import limit_threads, make_envs
from freerun.settings.registry import DEFAULT_TENSOR_MODE, make_config
from freerun.tools.bench.load_meter import LoadMeter, own_megabytes, own_seconds


class RandomActor:
    """A `TensorActor` without weights: all actions are equally likely, between -1 and 1 where there is no limit."""

    def __init__(self, spec: EnvSpec, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(0)
        self._space = spec.action_space
        self._device = device
        if isinstance(self._space, spaces.Box):
            low, high = (torch.from_numpy(limit).to(device) for limit in (self._space.low, self._space.high))
            self._low = torch.where(low.isfinite(), low, -1.0)
            self._range = torch.where(high.isfinite(), high, 1.0) - self._low
        else:
            sizes = [self._space.n] if isinstance(self._space, spaces.Discrete) else self._space.nvec.tolist()
            self._sizes = torch.tensor(sizes, device=device)

    def load(self, weights: FloatArray) -> None:
        """There is nothing to load."""

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        num_envs, log_prob = len(obs), torch.zeros(len(obs), device=self._device)
        if isinstance(self._space, spaces.Box):
            drawn = torch.rand((num_envs, *self._space.shape), generator=self.generator, device=self._device)
            return self._low + drawn * self._range, log_prob
        drawn = torch.rand((num_envs, len(self._sizes)), generator=self.generator, device=self._device)
        action = (drawn * self._sizes).long()
        return (action[:, 0] if isinstance(self._space, spaces.Discrete) else action), log_prob


def measure(env: str, env_args: Mapping[str, Any], num_envs: int, device: str, seconds: float) -> dict[str, float]:
    """Return the rates of the simulator in segments as the modes collect them, after the first one."""
    settings = {"env": env, "env_args": env_args, "mode": DEFAULT_TENSOR_MODE, "num_envs": num_envs, "device": device}
    config = complete(make_config(settings))
    began = time.perf_counter()
    limit_threads(1, 1)  # as at the start of a run
    made = make_envs(config)
    assert isinstance(made, TensorEnvs)
    simulator = made.envs[0]
    actor = RandomActor(simulator.spec, simulator.device)
    rollout = TensorRollout(simulator, actor, config.collector.num_steps_per_env)
    rollout.collect()  # the first segment allocates memory, and may be recorded as a graph
    startup_seconds = time.perf_counter() - began
    meter, used = LoadMeter(), own_seconds()
    began, steps, episodes = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - began) < seconds or not steps:
        segment = rollout.collect()
        steps += segment.num_steps
        episodes += int(segment.ended.sum())
    load, used = meter.read(), own_seconds() - used
    simulator.close()
    return {
        "steps_per_second": steps / elapsed,
        "episodes_per_second": episodes / elapsed,
        "startup_seconds": startup_seconds,
        "memory_megabytes": own_megabytes(),
        "cpu_percent": load.own,
        "others_percent": load.others,
        "cpu_seconds_per_step": used / steps,
        # The mean length of an episode. Where none has ended, it is at least as long as what was seen of it.
        "episode_steps": steps / episodes if episodes else steps / num_envs,
    }
