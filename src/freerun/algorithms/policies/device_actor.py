"""The policy on a simulator's device, for observations that are tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from freerun.algorithms.policies.action_heads import MASKED_LOGIT, SMALLEST_EXPONENTIAL
from freerun.algorithms.policies.mlp_actor import NORMALIZED_LIMIT, ActorSpec, named_views
from freerun.algorithms.policies.networks import (
    categorical_log_prob,
    gaussian_log_prob,
    masked_logits,
    mlp,
    squashed_sample,
)
from freerun.core import FloatArray


class DeviceActor:
    """A `TensorActor` with its own copy of the weights, so that the learner can train another copy meanwhile.

    Its weights never move in memory, so `act` can be captured in a CUDA graph.
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
        """`network` is a user's own, or None for an MLP. `arrays` are the policy's, in the order of its flat buffer."""
        self.spec = spec
        self.generator = torch.Generator(device).manual_seed(seed)
        self._scalar_actions = scalar_actions
        self._device = device
        sizes = (spec.obs_size, *spec.hidden_sizes, spec.output_size)
        self.network = (mlp(sizes, spec.activation, 1.0) if network is None else network).to(device)
        self.network.requires_grad_(False)
        tensors = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        self._weights = torch.cat([torch.from_numpy(array).reshape(-1) for array in arrays.values()]).to(device)
        shapes = {name: array.shape for name, array in arrays.items()}
        self._views: dict[str, Tensor] = named_views(self._weights, shapes)
        for name in self._views.keys() & tensors.keys():
            # The network reads the flat buffer itself, so `load` is a single copy.
            tensors[name].data = self._views[name]
        low, high = (torch.tensor(limits, device=device) for limits in (spec.low, spec.high))
        self._centre, self._half_range = (high + low) / 2, (high - low) / 2

    def load(self, weights: FloatArray) -> None:
        self._weights.copy_(torch.from_numpy(weights))

    @torch.no_grad()
    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        rows = obs.reshape(len(obs), -1)
        return self.sample(self.network(self.normalized(rows)), rows)

    def normalized(self, rows: Tensor) -> Tensor:
        """What the policy sees of observations [N, ...]."""
        obs = rows[:, : self.spec.obs_size].float()
        if self.spec.normalize_obs:
            obs = (obs - self._views["obs_mean"]) * self._views["obs_scale"]
            obs = obs.clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)
        return obs

    def sample(self, output: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Actions for the network's outputs for these observations, and their log-probabilities."""
        num_rows, spec = len(rows), self.spec
        if spec.has_mask:
            output = masked_logits(output, rows)
        if spec.epsilon_greedy:
            return self._explore(output), torch.zeros_like(output[:, 0])
        if spec.categories:
            return self._sample_categories(output)
        noise = torch.randn((num_rows, spec.gaussian_size), generator=self.generator, device=self._device)
        if spec.noise_range:
            lowest, highest = spec.noise_range
            # Each environment has a deviation of its own, evenly spaced from the lowest to the highest.
            std = torch.linspace(lowest, highest, num_rows, device=self._device)[:, None]
            action = (output.tanh() + std * noise).clamp(-1.0, 1.0)
            # As `action_heads.NoisyTanh`: nobody asks for the probability of such actions.
            return self._centre + self._half_range * action, torch.zeros_like(action[:, 0])
        if spec.low:
            mean, log_std = output.chunk(2, dim=1)
            action, log_prob = squashed_sample(mean, log_std, noise)
            # Stretching [-1, 1] to the action range divides the density by the half-ranges.
            return self._centre + self._half_range * action, log_prob - self._half_range.log().sum()
        log_std = self._views["log_std"]
        action = output + log_std.exp() * noise
        return action, gaussian_log_prob(output, log_std, action)

    def _explore(self, values: Tensor) -> Tensor:
        """As `epsilon_greedy.EpsilonGreedy`: one number decides whether to explore, another one chooses."""
        noise = torch.rand((len(values), 2), generator=self.generator, device=self._device)
        choice = (noise[:, 1] * self.spec.output_size).long()
        if self.spec.has_mask:
            # That with the number floor(u * n) among the n choices that are allowed.
            num_so_far = (values != MASKED_LOGIT).cumsum(dim=1)
            number = (noise[:, 1] * num_so_far[:, -1]).floor()
            choice = (num_so_far <= number[:, None]).sum(dim=1).clamp(max=self.spec.output_size - 1)
        return torch.where(noise[:, 0] < self._views["epsilon"], choice, values.argmax(dim=1))

    def _sample_categories(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample by the Gumbel-max trick, as `action_heads.Categorical` does."""
        exponential = torch.empty_like(logits).exponential_(generator=self.generator)
        # argmax_i (logit_i + g_i) with g = -log(e), e ~ Exp(1)
        perturbed = logits - exponential.clamp(min=float(SMALLEST_EXPONENTIAL)).log()
        parts = torch.split(perturbed, list(self.spec.categories), dim=1)
        action = torch.stack([part.argmax(dim=1) for part in parts], dim=1)
        log_prob = categorical_log_prob(logits, self.spec.categories, action)
        return action.squeeze(1) if self._scalar_actions else action, log_prob
