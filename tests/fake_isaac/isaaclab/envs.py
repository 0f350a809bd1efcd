"""A task that counts: row i of N ends its episodes after 2 + i steps, even rows by a crash, odd ones by time."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from isaaclab.configs import Config


class CountingEnv(gymnasium.Env[Any, Any]):
    """As Isaac Lab's: flags are buffers that are used again, extras are never cleared, episodes restart in the step."""

    open_simulations: ClassVar[int] = 0

    def __init__(self, cfg: Config, **_: Any):
        if cfg.lacks == "omni":  # what the download of a robot imports
            raise ModuleNotFoundError("No module named 'omni'", name="omni")
        if cfg.lacks:
            raise FileNotFoundError(f"Unable to find the file: {cfg.lacks}")
        if CountingEnv.open_simulations:
            raise RuntimeError("Simulation context already exists. Cannot create a new one.")
        CountingEnv.open_simulations += 1
        self.cfg, self.num_envs, self.device = cfg, cfg.scene.num_envs, cfg.sim.device
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        groups: dict[str, spaces.Space[Any]] = {"policy": vector}
        if cfg.has_critic:
            groups["critic"] = spaces.Box(-np.inf, np.inf, (5,), np.float32)
        if cfg.separate_terms:
            groups["policy"] = spaces.Dict({"position": vector, "velocity": vector})
        self.single_observation_space = spaces.Dict(groups)
        self.single_action_space = cfg.actions
        self.rows = torch.arange(self.num_envs, device=self.device)
        self.lengths = 2 + self.rows
        self.steps = torch.zeros_like(self.rows)
        self.episodes = torch.zeros_like(self.rows)
        self.terminated, self.truncated = torch.zeros((2, self.num_envs), dtype=torch.bool, device=self.device)
        self.reward = torch.zeros(self.num_envs, device=self.device)
        self.obs = torch.zeros((self.num_envs, 3), device=self.device)
        self.extras: dict[str, Any] = {"log": {}}
        self.num_steps = 0
        self.last_action: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.steps.zero_()
        return self._observe(), self.extras

    def step(self, action: Any) -> Any:
        self.last_action = action
        self.num_steps += 1
        if self.num_steps == self.cfg.fails_at:
            raise RuntimeError("the physics engine has blown up")
        self.steps += 1
        ended = self.steps >= self.lengths
        self.terminated.copy_(ended & (self.rows % 2 == 0))
        self.truncated.copy_(ended & (self.rows % 2 == 1))
        self.reward.copy_(self.steps.float())
        if ended.any():
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self._observe()
            self.extras["log"]["Metrics/length"] = self.steps[ended].float().mean()
            self.extras["log"]["ended"] = int(ended.sum())
            self.steps.masked_fill_(ended, 0)
            self.episodes += ended
        return self._observe(), self.reward, self.terminated, self.truncated, self.extras

    def close(self) -> None:
        CountingEnv.open_simulations -= 1

    def _observe(self) -> dict[str, Any]:
        now = torch.stack([self.rows, self.episodes, self.steps], 1).float()
        if self.cfg.reuses_obs:
            now = self.obs.copy_(now)
        return (
            {"policy": now, "critic": torch.full((self.num_envs, 5), 7.0)} if self.cfg.has_critic else {"policy": now}
        )
