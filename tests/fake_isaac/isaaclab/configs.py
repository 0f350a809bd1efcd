"""The settings of a task."""

from typing import Any

import numpy as np
from gymnasium import spaces

from isaaclab import VERSION


class SimConfig:
    def __init__(self) -> None:
        self.dt = 0.01
        self.device = "cuda:0"


class SceneConfig:
    def __init__(self) -> None:
        self.num_envs = 4


class Config:
    def __init__(self) -> None:
        self.sim, self.scene = SimConfig(), SceneConfig()
        self.seed: int | None = None
        self.is_finite_horizon = False
        self.has_critic = False
        self.reuses_obs = False
        self.fails_at: int | None = None
        self.separate_terms = False
        self.lacks = ""
        self.actions: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        if VERSION == 3:
            self.compute_final_obs = False
