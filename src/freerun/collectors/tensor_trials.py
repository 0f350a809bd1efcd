"""A policy tried where environments are tensors: one episode of each, so that short ones are not favoured."""

from __future__ import annotations

import numpy as np
import torch

from freerun.core import EnvFailure, Policy, TensorEnv


def play_tensors(env: TensorEnv, policy: Policy, seed: int) -> tuple[list[float], list[int]]:
    """Returns and lengths of the first episode of every environment."""
    rng = np.random.default_rng(seed)
    total, length = np.zeros(env.num_envs), np.zeros(env.num_envs, int)
    open_ = np.ones(env.num_envs, bool)
    obs = env.reset()
    while open_.any():
        noise = policy.draw(rng, env.num_envs)
        action = torch.from_numpy(policy.act(obs.cpu().numpy(), noise).action).to(env.device)
        try:
            obs, _, reward, terminated, truncated = env.step(action)
        except Exception as error:
            raise EnvFailure(f"the simulator failed in a step: {type(error).__name__}: {error}") from error
        total += np.where(open_, reward.cpu().numpy(), 0.0)
        length += open_
        open_ &= ~(terminated | truncated).cpu().numpy()
    return total.tolist(), length.tolist()
