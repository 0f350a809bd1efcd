"""The policy where observations are tensors: on the simulator's device, with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from freerun.algorithms.actor import NORMALIZED_LIMIT, ActorSpec
from freerun.algorithms.heads import SMALLEST_EXPONENTIAL
from freerun.algorithms.networks import categorical_log_prob, gaussian_log_prob, mlp, squash
from freerun.core import FloatArray


class DeviceActor:
    """A `TensorActor`. The learner trains another copy meanwhile; `load` brings this one up to date.

    Its weights stay where they are in memory, so `act` can be recorded in a CUDA graph.
    """

    def __init__(
        self,
        spec: ActorSpec,
        network: nn.Module | None,
        arrays: Mapping[str, FloatArray],
        scalar_actions: bool,
        device: torch.device,
        seed: int,
    ):
        """`network` is a user's own; without one it is an MLP. `arrays` are the policy's, by name and in order."""
        self.spec = spec
        self.generator = torch.Generator(device).manual_seed(seed)
        self._scalar_actions = scalar_actions
        self._device = device
        sizes = (spec.obs_size, *spec.hidden_sizes, spec.output_size)
        self._network = (mlp(sizes, spec.activation, 1.0) if network is None else network).to(device)
        self._network.requires_grad_(False)
        tensors = {**dict(self._network.named_parameters()), **dict(self._network.named_buffers())}
        self._weights = torch.cat([torch.from_numpy(array).reshape(-1) for array in arrays.values()]).to(device)
        self._parts: dict[str, Tensor] = {}
        start = 0
        for name, array in arrays.items():
            self._parts[name] = self._weights[start : start + array.size].view(array.shape)
            if name in tensors:
                tensors[name].data = self._parts[name]
            start += array.size
        low, high = (torch.tensor(limits, device=device) for limits in (spec.low, spec.high))
        self._centre, self._reach = (high + low) / 2, (high - low) / 2

    def load(self, weights: FloatArray) -> None:
        self._weights.copy_(torch.from_numpy(weights))

    @torch.no_grad()
    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, spec = len(obs), self.spec
        obs = obs.reshape(num_rows, -1).float()
        if spec.normalize_obs:
            obs = (obs - self._parts["obs_mean"]) * self._parts["obs_scale"]
            obs = obs.clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)
        output: Tensor = self._network(obs)
        if spec.categories:
            return self._choose(output)
        noise = torch.randn((num_rows, spec.gaussian_size), generator=self.generator, device=self._device)
        if spec.low:
            mean, log_std = output.chunk(2, dim=1)
            action, log_prob = squash(mean, log_std, noise)
            return self._centre + self._reach * action, log_prob - self._reach.log().sum()
        log_std = self._parts["log_std"]
        action = output + log_std.exp() * noise
        return action, gaussian_log_prob(output, log_std, action)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """By the Gumbel-max trick, as the workers' policy does it."""
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        perturbed = logits - noise.clamp(min=float(SMALLEST_EXPONENTIAL)).log()
        parts = torch.split(perturbed, list(self.spec.categories), dim=1)
        action = torch.stack([part.argmax(dim=1) for part in parts], dim=1)
        log_prob = categorical_log_prob(logits, self.spec.categories, action)
        return action.squeeze(1) if self._scalar_actions else action, log_prob
