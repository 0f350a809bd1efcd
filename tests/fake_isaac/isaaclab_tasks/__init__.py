"""Registers tasks, as importing Isaac Lab's does; version 2 can do so only once its app runs."""

import gymnasium
from isaaclab import EVENTS

assert EVENTS or __import__("isaaclab").VERSION == 3, "the app must be launched before the tasks are imported"
for _name in ("Isaac-Counting-Direct-v0", "Isaac-Counting-Flat-v0", "Isaac-PhysX-Only-v0"):
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point="isaaclab.envs:CountingEnv", disable_env_checker=True)
