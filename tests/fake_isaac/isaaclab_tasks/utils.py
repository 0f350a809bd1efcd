from typing import Any

from isaaclab.configs import Config


def parse_env_cfg(task: str, device: str | None = None, num_envs: int | None = None) -> Any:
    config: Any = Config()
    config.needs_isaac_sim = task == "Isaac-PhysX-Only-v0"
    if device is not None:
        config.sim.device = device
    if num_envs is not None:
        config.scene.num_envs = num_envs
    return config
