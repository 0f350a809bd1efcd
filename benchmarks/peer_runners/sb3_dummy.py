"""Stable-Baselines3's DummyVecEnv: all environments in one process, as its documentation advises for short steps."""

from __future__ import annotations

from functools import partial

import measuring
import sb3_subproc
from stable_baselines3.common.vec_env import DummyVecEnv

if __name__ == "__main__":
    measuring.run(partial(sb3_subproc.collecting, vector=DummyVecEnv), __doc__)
