"""Evaluation of a policy on environments that are tensors."""

from __future__ import annotations

import numpy as np
import torch

from freerun.core import EnvFailure, Policy, TensorEnv


def play_tensors(env: TensorEnv, policy: Policy, seed: int) -> tuple[list[float], list[int]]:
    """Play the first episode of every environment; return the episodes' returns and lengths.

    Only the first counts: the N episodes that end earliest would be mostly short ones, and so a biased sample.
    """
    rng = np.random.default_rng(seed)
    total, length = np.zeros(env.num_envs), np.zeros(env.num_envs, int)
    is_running = np.ones(env.num_envs, bool)
    obs = env.reset()
    while is_running.any():
        noise = policy.draw(rng, env.num_envs)
        action = torch.from_numpy(policy.act(obs.cpu().numpy(), noise).action).to(env.device)
        try:
            obs, _, reward, terminated, truncated = env.step(action)
        except Exception as error:
            raise EnvFailure(f"the simulator failed in a step: {type(error).__name__}: {error}") from error
        total += np.where(is_running, reward.cpu().numpy(), 0.0)
        length += is_running
        is_running &= ~(terminated | truncated).cpu().numpy()
    return total.tolist(), length.tolist()
