"""Torch networks and the log-probabilities of their actions. `action_heads.py` computes the same in numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.policies.action_heads import LOG_SQRT_2PI, LOG_STD_LIMITS, MASKED_LOGIT
from freerun.algorithms.policies.mlp_actor import NORM_EPSILON, NORMALIZED_LIMIT, ActorSpec, HiddenActivation
from freerun.core import FloatArray, Policy


class Tanh(nn.Tanh):
    """The same as torch's. Where no gradient is wanted on a CPU, numpy computes it, in a fraction of torch's time."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.device.type != "cpu":
            return super().forward(x)
        return torch.from_numpy(np.tanh(x.numpy()))


class NormalizedReLU(nn.Module):
    """Layer normalisation without weights of its own, then a ReLU: the next layer can scale and shift by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.nn.functional.layer_norm(x, x.shape[-1:], eps=NORM_EPSILON))


ACTIVATIONS: dict[HiddenActivation, type[nn.Module]] = {
    "tanh": Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "normalized-relu": NormalizedReLU,
}


def mlp(sizes: Sequence[int], activation: HiddenActivation, output_gain: float) -> nn.Sequential:
    """Linear layers with orthogonal weights and zero biases, as is usual for PPO.

    Hidden layers have gain sqrt(2). A small `output_gain` makes the first actions hardly depend on the observation.
    """
    layers: list[nn.Module] = []
    for layer, (num_in, num_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(num_in, num_out)
        is_last = layer == len(sizes) - 2
        nn.init.orthogonal_(linear.weight, output_gain if is_last else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if not is_last:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


def mlp_from(spec: ActorSpec, arrays: Mapping[str, FloatArray]) -> nn.Sequential:
    """The network of a policy that workers run in numpy, from its arrays, with torch's own tanh: it can be traced."""
    network = mlp((spec.obs_size, *spec.hidden_sizes, spec.output_size), spec.activation, 1.0)
    network.load_state_dict({name: torch.from_numpy(arrays[name].copy()) for name in network.state_dict()})
    return traceable(network)


def traceable(network: nn.Sequential) -> nn.Sequential:
    """The same layers with torch's own tanh, which torch's exporters can follow."""
    return nn.Sequential(*(nn.Tanh() if isinstance(layer, Tanh) else layer for layer in network))


class TrunkNetwork(nn.Module):
    """A network of two parts: a trunk, which another network may share, and a head on the trunk's features."""

    def __init__(self, trunk: nn.Module, head: nn.Sequential):
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.trunk(rows))  # type: ignore[no-any-return]


def flatten_parameters(module: nn.Module) -> nn.Parameter:
    """Lay all weights end to end in one buffer, and all gradients in another; return both as one parameter.

    Clipping, Adam and zeroing then cost one call each instead of one per layer: a third of a small gradient step.
    """
    parameters = list(module.parameters())
    flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.data = flat.data[start:end].view_as(parameter)
        parameter.grad = flat.grad[start:end].view_as(parameter)
        start = end
    return flat


def step_if_finite(
    optimizer: torch.optim.Adam, gradient: Tensor, num_bad_gradients: Tensor, is_skipped: Tensor | None = None
) -> None:
    """Take the optimiser's step, unless the gradient is not finite: such a gradient is counted and changes nothing.

    Where `is_skipped` is true, the step is not taken either, and nothing is counted.

    A gradient of zeros would not do, because Adam would still follow its older gradients. The step is skipped on the
    device, so the host waits for nothing: `found_inf` is how torch's own GradScaler tells a fused optimiser to skip.
    """
    # One number that is not finite makes the sum so too. A sum that overflows counts as bad as well.
    is_bad = ~gradient.sum().isfinite()
    num_bad_gradients += is_bad if is_skipped is None else is_bad & ~is_skipped
    if is_skipped is not None:
        is_bad = is_bad | is_skipped
    optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
    optimizer.step()


class StackedMLP(nn.Module):
    """K networks of one shape, computed by one batched product per layer: [K, B, inputs] -> [K, B, outputs]."""

    def __init__(self, num_nets: int, sizes: Sequence[int], activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self._activation = activation
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for num_in, num_out in itertools.pairwise(sizes):
            # Weights ~ U(-1 / sqrt(inputs), 1 / sqrt(inputs)), as those of torch.nn.Linear; biases 0.
            limit = 1 / math.sqrt(num_in)
            self.weights.append(torch.empty(num_nets, num_in, num_out).uniform_(-limit, limit))
            self.biases.append(torch.zeros(num_nets, 1, num_out))

    def forward(self, x: Tensor) -> Tensor:
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            # b + x @ W, for all networks at once
            x = torch.baddbmm(bias, x, weight)
            if layer < last:
                x = self._activation(x)
        return x


class ActorCritic(nn.Module):
    """A policy and a value function behind one observation normaliser. Only networks for images share layers.

    Where an observation consists of several groups, each of them sees its own, and none the mask.
    """

    obs_mean: Tensor
    obs_scale: Tensor

    def __init__(self, spec: ActorSpec, own_networks: tuple[nn.Module, nn.Module] | None = None):
        """`own_networks` are for images, or the user's own: the policy's and the value function's. Without them both
        are MLPs."""
        super().__init__()
        self.spec = spec
        if own_networks is None:
            critic_size = spec.critic_obs_size or spec.obs_size
            self.actor: nn.Module = mlp((spec.obs_size, *spec.hidden_sizes, spec.output_size), spec.activation, 0.01)
            self.critic: nn.Module = mlp((critic_size, *spec.hidden_sizes, 1), spec.activation, 1.0)
        else:
            self.actor, self.critic = own_networks
        if spec.gaussian_size:
            self.log_std = nn.Parameter(torch.zeros(spec.gaussian_size))
        self.row_size = spec.row_size
        first = spec.obs_size if spec.critic_obs_size else 0
        self.seen_by_critic = slice(first, first + (spec.critic_obs_size or spec.obs_size))
        self.register_buffer("obs_mean", torch.zeros(self.row_size))
        self.register_buffer("obs_scale", torch.ones(self.row_size))

    def normalize(self, obs: Tensor) -> Tensor:
        """clip((obs - mean) / std); `obs_scale` is 1 / std."""
        if not self.spec.normalize_obs:
            return obs
        return ((obs - self.obs_mean) * self.obs_scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def head(self, normalized_obs: Tensor) -> Tensor:
        """The policy's output, such as logits, for whole observations [N, row_size]."""
        has_more = self.spec.has_more_than_policy_sees
        output: Tensor = self.actor(normalized_obs[:, : self.spec.obs_size] if has_more else normalized_obs)
        return masked_logits(output, normalized_obs) if self.spec.has_mask else output

    def value(self, normalized_obs: Tensor) -> Tensor:
        """V(s) [N] for whole observations [N, row_size]."""
        has_more = self.spec.has_more_than_policy_sees
        seen = normalized_obs[:, self.seen_by_critic] if has_more else normalized_obs
        return self.critic(seen).squeeze(-1)  # type: ignore[no-any-return]

    def head_and_value(self, normalized_obs: Tensor) -> tuple[Tensor, Tensor]:
        """What `head` and `value` return, with a trunk that both share computed once."""
        actor, critic = self.actor, self.critic
        if not (isinstance(actor, TrunkNetwork) and isinstance(critic, TrunkNetwork) and actor.trunk is critic.trunk):
            return self.head(normalized_obs), self.value(normalized_obs)
        features = actor.trunk(normalized_obs[:, : self.spec.obs_size])
        output = actor.head(features)
        output = masked_logits(output, normalized_obs) if self.spec.has_mask else output
        return output, critic.head(features).squeeze(-1)

    def log_prob(self, head: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities [N] of actions, given the actor's output `head`."""
        if self.spec.gaussian_size:
            return gaussian_log_prob(head, self.log_std, action)
        return categorical_log_prob(head, self.spec.categories, action[:, None].flatten(1))

    def entropy(self, head: Tensor) -> Tensor:
        if self.spec.gaussian_size:
            return gaussian_entropy(self.log_std).expand(len(head))
        return categorical_entropy(head, self.spec.categories)

    def export(self, policy: Policy) -> None:
        """Copy the actor's weights and the normaliser into the workers' policy."""
        arrays = self.worker_arrays()
        policy.load(torch.cat([arrays[name].detach().reshape(-1) for name in policy.arrays]).cpu().numpy())

    def worker_arrays(self) -> dict[str, Tensor]:
        """Everything that the workers' policy needs, by name."""
        normalizer = {"obs_mean": self.obs_mean, "obs_scale": self.obs_scale}
        arrays = {name: tensor[: self.spec.obs_size] for name, tensor in normalizer.items()} | self.actor.state_dict()
        return {**arrays, "log_std": self.log_std} if self.spec.gaussian_size else arrays


def masked_logits(logits: Tensor, rows: Tensor) -> Tensor:
    """The logits without the choices that the masks at the end of these observations do not allow.

    What is ruled out has probability 0 and no part in the entropy, and no gradient flows to it (Huang and Ontañón 2022,
    "A closer look at invalid action masking")."""
    return torch.where(rows[:, -logits.shape[1] :] == 0, MASKED_LOGIT, logits)


def categorical_log_prob(logits: Tensor, categories: Sequence[int], action: Tensor) -> Tensor:
    """The joint log-probability of independent categories; `action` is [N, number of categories]."""
    log_prob = logits.new_zeros(len(logits))
    for column, part in enumerate(torch.split(logits, list(categories), dim=1)):
        # log pi(a) = sum_k log softmax(x_k)[a_k]
        log_prob = log_prob + part.log_softmax(dim=1).gather(1, action[:, column : column + 1]).squeeze(1)
    return log_prob


def categorical_entropy(logits: Tensor, categories: Sequence[int]) -> Tensor:
    """H = -sum_i p_i log p_i, summed over independent categories."""
    entropy = logits.new_zeros(len(logits))
    for part in torch.split(logits, list(categories), dim=1):
        log_probs = part.log_softmax(dim=1)
        entropy = entropy - (log_probs.exp() * log_probs).sum(dim=1)
    return entropy


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """log N(a; mean, std) of a diagonal Gaussian: -0.5 * sum(((a - mean) / std)^2) - sum(log std + log sqrt(2 pi))."""
    noise = (action - mean) * (-log_std).exp()
    log_prob: Tensor = -0.5 * noise.square().sum(dim=1) - (log_std.sum() + LOG_SQRT_2PI * len(log_std))
    return log_prob


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """H = sum_i (log std_i + 0.5 + log sqrt(2 pi))."""
    return torch.sum(log_std + 0.5 + LOG_SQRT_2PI)


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions a = tanh(u) in [-1, 1] with u = mean + std * noise, and their log-probabilities.

    Haarnoja et al. 2018, appendix C: log p(a) = log N(u; mean, std) - sum log(1 - tanh(u)^2).
    """
    log_std = log_std.clamp(*LOG_STD_LIMITS)
    unsquashed = mean + log_std.exp() * noise
    # log(1 - tanh(u)^2) = 2 * (log 2 - u - softplus(-2u)), which keeps its digits at large |u|
    log_slope = 2 * (math.log(2) - unsquashed - nn.functional.softplus(-2 * unsquashed))
    log_prob = -0.5 * noise.square() - log_std - LOG_SQRT_2PI - log_slope
    return unsquashed.tanh(), log_prob.sum(dim=-1)
