"""Rewards divided by the standard deviation of the discounted return, for `--normalize-reward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from freerun.algorithms.policies.mlp_actor import NORMALIZED_LIMIT
from freerun.algorithms.policies.running_moments import RunningMoments
from freerun.algorithms.ppo.returns import running_return
from freerun.core import AnySegment, LearnerGroup, Segment, TensorSegment

MAX_OPEN_EPISODES = 100_000
"""An episode whose worker has died is never continued, and the learner does not hear of it. Beyond this number of open
episodes, those are forgotten that have not been continued for longest."""


def scaled_reward(reward: Tensor, factor: float) -> Tensor:
    """Rewards times a factor, clipped as normalised observations are."""
    return (reward * factor).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)


class RewardScale:
    """Scales rewards by 1 / std(R), where R_t = r_t + gamma * R_{t-1} is the running return of each environment.

    The return of an episode is carried from one segment to the next, so the statistics are the same whether an episode
    arrives whole or in pieces. It restarts after an episode has terminated or was truncated. (Gymnasium's
    `NormalizeReward` continues through a truncation, and counts the last reward of a terminated episode without the
    return before it; within an episode both agree.)

    Where a queue has dropped steps of an episode, its return continues from the last steps that arrived: restarting it
    would make it too small. With several learners, each carries the returns of its own episodes, and all share the
    statistics.
    """

    def __init__(self, gamma: float):
        self._gamma = gamma
        self.moments = RunningMoments()
        self._episode_returns: dict[int, float] = {}  # of episodes that have not ended, by number; oldest first
        self._simulator_returns: dict[int, Tensor] = {}  # [N] of the environments of each simulator, by worker

    def __call__(
        self,
        segments: Sequence[AnySegment],
        reward: Tensor,
        ended: Tensor,
        learner_group: LearnerGroup,
        mask: Tensor | None = None,
    ) -> float:
        """Add the rewards [T, B] of these segments, which stand side by side; return what to multiply rewards by.

        Where segments differ in length, `mask` tells their steps from the padding.
        """
        # float64: a run may sum up millions of rewards
        returns, weights = running_return(reward.double(), ended, self._gamma)
        column = 0
        for segment in segments:
            num_steps, width = segment.reward.shape
            block = (slice(num_steps), slice(column, column + width))
            column += width
            if num_steps and isinstance(segment, TensorSegment):
                self._continue_simulator(segment, returns[block], weights[block])
            elif num_steps and isinstance(segment, Segment):
                self._continue_episodes(segment, returns[block], weights[block])
        self.moments.update(returns.flatten() if mask is None else returns[mask], learner_group)
        # r_t / std(R); the mean is not subtracted, because that would change which policy is best
        return float(self.moments.scale)

    def _continue_episodes(self, segment: Segment, returns: Tensor, weights: Tensor) -> None:
        """Add to a segment's returns, in place, what its episodes had collected before it; remember the open ones."""
        # Popped, and inserted again if still open: so the dict is ordered by when an episode was last continued.
        before = [self._episode_returns.pop(episode, 0.0) for episode in segment.episode[0].tolist()]
        if any(before):
            # R_t + weight_t * (the return before the segment), as `running_return` says
            returns += weights * torch.tensor(before, dtype=returns.dtype, device=returns.device)
        ended, now = segment.ended[-1].tolist(), returns[-1].tolist()
        for episode, has_ended, value in zip(segment.episode[-1].tolist(), ended, now, strict=True):
            if not has_ended:
                self._episode_returns[episode] = value
        while len(self._episode_returns) > MAX_OPEN_EPISODES:
            del self._episode_returns[next(iter(self._episode_returns))]

    def _continue_simulator(self, segment: TensorSegment, returns: Tensor, weights: Tensor) -> None:
        """The same on the device. Episodes have no numbers there, but a length of 1 marks the first step of one."""
        before = self._simulator_returns.get(segment.worker)
        if before is not None and before.shape == returns[0].shape:
            is_first_step = (segment.episode_length[0] == 1).to(returns.device)
            returns += weights * before.to(returns.device).masked_fill(is_first_step, 0.0)
        self._simulator_returns[segment.worker] = returns[-1].masked_fill(segment.ended[-1].to(returns.device), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": self.moments.state_dict(),
            "of_episodes": dict(self._episode_returns),
            "of_simulators": dict(self._simulator_returns),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])
        self._episode_returns = dict(state["of_episodes"])
        self._simulator_returns = dict(state["of_simulators"])
