"""The policy with a memory on a simulator's device, for observations that are tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from freerun.algorithms.policies.device_actor import DeviceActor
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.core import FloatArray


class MemoryDeviceActor(DeviceActor):
    """A `MemoryTensorActor`. Its network is a `RecurrentNetwork`."""

    def __init__(
        self,
        spec: ActorSpec,
        network: nn.Module,
        arrays: Mapping[str, FloatArray],
        scalar_actions: bool,
        device: torch.device,
        seed: int,
        memory_size: int,
    ):
        super().__init__(spec, network, arrays, scalar_actions, device, seed)
        self.memory_size = memory_size

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.act_from(obs, torch.zeros((len(obs), self.memory_size), device=obs.device))

    @torch.no_grad()
    def act_from(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        rows = obs.reshape(len(obs), -1)
        output, next_memory = self.network(self.normalized(rows), memory)
        memory.copy_(next_memory)
        return self.sample(output, rows)
