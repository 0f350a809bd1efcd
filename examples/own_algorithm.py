"""Your own algorithm: REINFORCE with a learned baseline. It runs in every mode; it is resumed and replayed as ours are.

python examples/own_algorithm.py
PYTHONPATH=examples freerun train CartPole-v1 --algo own_algorithm:Reinforce --learning-rate 0.003 --mode pipes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

import freerun
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.ppo.training_batch import flatten_segments
from freerun.core import AlgorithmTraits, AnySegment, Demand, EnvSpec, LearnerGroup, Metrics


@dataclass(frozen=True)
class ReinforceConfig:
    """Its fields become flags: --episodes-per-update, --learning-rate, --gamma."""

    episodes_per_update: int = 20
    """Whole episodes that each update learns from."""
    learning_rate: float = 0.005
    """Adam's step size."""
    gamma: float = 0.99
    """Discount per step."""


class Reinforce:
    """REINFORCE (Williams 1992), with a value function as its baseline."""

    Config = ReinforceConfig
    # Nothing here corrects for older weights: so --max-lag is 0, and workers wait while the learner updates.
    traits = AlgorithmTraits(on_policy=True, default_max_lag=0, counts_episodes=True)

    def __init__(
        self,
        env: EnvSpec,
        config: ReinforceConfig,
        seed: int,
        device: str,
        deterministic: bool,
        learner_group: LearnerGroup | None = None,
    ):
        self.config = config
        self._device = torch.device(device)
        spec = ActorSpec.of(env, hidden_sizes=(32, 32), activation="tanh")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._net = ActorCritic(spec).to(self._device)
        self._optimizer = torch.optim.Adam(self._net.parameters(), config.learning_rate)
        # The policy travels to the workers: the same network in numpy, with all weights in one flat buffer.
        self.policy = MLPActor(spec, isinstance(env.action_space, spaces.Discrete), batch_invariant=deterministic)
        self._net.export(self.policy)
        self._segments: list[AnySegment] = []

    def demand(self) -> Demand:
        """What is missing before the next update; nothing means "update now"."""
        return Demand(episodes=max(0, self.config.episodes_per_update - len(self._segments)))

    def observe(self, segments: Sequence[AnySegment]) -> None:
        self._segments.extend(segments)

    def update(self, version: int, progress: float) -> Metrics:
        batch = flatten_segments(self._segments, self._device)  # batch.rows[t, b]: the row of step t, episode b
        self._segments = []
        target = self._returns(batch.reward, batch.rows, batch.mask)
        value = self._net.value(batch.obs)
        log_prob = self._net.log_prob(self._net.actor(batch.obs), batch.action)
        advantage = target - value.detach()
        policy_loss = -(log_prob * (advantage - advantage.mean()) / (advantage.std() + 1e-8)).mean()
        value_loss = (value - target).square().mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(policy_loss + 0.5 * value_loss)
        torch.nn.utils.clip_grad_norm_(self._net.parameters(), 0.5)
        self._optimizer.step()
        self._net.export(self.policy)  # the loop publishes it as the next version
        return {"policy_loss": policy_loss.item(), "value_loss": value_loss.item()}

    def _returns(self, reward: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """R_t = r_t + gamma * R_{t+1}, to the end of each episode."""
        flat = torch.empty_like(reward)
        running = torch.zeros_like(reward[rows[0]])
        for step in reversed(range(len(rows))):
            running = (reward[rows[step]] + self.config.gamma * running) * mask[step]
            flat[rows[step][mask[step]]] = running[mask[step]]
        return flat

    def state_dict(self) -> dict[str, Any]:
        return {"net": self._net.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._net.export(self.policy)


def main() -> None:
    result = freerun.train("CartPole-v1", algo=Reinforce, total_episodes=800, num_workers=2)
    print(f"mean return {result.summary['mean_return']:.1f}")


if __name__ == "__main__":
    main()
