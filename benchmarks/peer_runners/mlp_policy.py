"""The policy of the systems that bring none of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

HIDDEN = 64
HALF_LOG_TWO_PI = 0.9189385332046727


class MlpPolicy(nn.Module):
    """Two hidden layers of 64 with tanh; samples without torch.distributions, which would take twice the time."""

    def __init__(self, obs_space: spaces.Space[Any], action_space: spaces.Space[Any]):
        super().__init__()
        assert isinstance(obs_space, spaces.Box)
        assert isinstance(action_space, spaces.Box | spaces.Discrete)
        self.bounds = (action_space.low, action_space.high) if isinstance(action_space, spaces.Box) else None
        num_outputs = int(action_space.n) if isinstance(action_space, spaces.Discrete) else action_space.shape[0]
        self.network = nn.Sequential(
            nn.Linear(obs_space.shape[0], HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, num_outputs),
        )
        self.log_std = nn.Parameter(torch.zeros(num_outputs))

    @torch.inference_mode()
    def act(self, obs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Sample an action for each row; with their log-probabilities, which every learner asks for."""
        output = self.network(torch.as_tensor(obs, dtype=torch.float32))
        if self.bounds is None:
            log_probs = torch.log_softmax(output, -1)
            choices = torch.multinomial(log_probs.exp(), 1)
            return choices.squeeze(-1).numpy(), log_probs.gather(-1, choices).squeeze(-1).numpy()
        noise: Tensor = torch.randn_like(output)
        log_prob = (-0.5 * noise.square() - self.log_std - HALF_LOG_TWO_PI).sum(-1)
        actions = (output + self.log_std.exp() * noise).numpy()
        return np.clip(actions, *self.bounds), log_prob.numpy()
