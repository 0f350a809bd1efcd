"""mjlab's tasks: Isaac Lab's interface on MuJoCo Warp, as RSL-RL environments."""

from __future__ import annotations

import difflib
from typing import Any

from freerun.adapters.rsl_rl_env import RslRlEnv, split_groups
from freerun.core import UserError

PREFIX = "mjlab:"


def make(
    name: str,
    num_envs: int,
    device: str,
    seed: int,
    clip_actions: float | None = None,
    obs_groups: str | None = None,
    critic_groups: str | None = None,
) -> RslRlEnv:
    """The environments of mjlab:TASK. The task's config is used as it is registered."""
    try:
        import mjlab.tasks  # noqa: F401 (registers the tasks)
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.rl import RslRlVecEnvWrapper
        from mjlab.tasks.registry import list_tasks, load_env_cfg
    except ImportError as error:
        raise UserError(
            f"mjlab is not installed here ({error}): pip install mjlab in the environment of freerun"
        ) from error
    task, tasks = name.removeprefix(PREFIX), list_tasks()
    if task not in tasks:
        close = difflib.get_close_matches(task, tasks, n=1)
        raise UserError(f"mjlab has no task {task!r}: {f'did you mean {close[0]}?' if close else ', '.join(tasks)}")
    config: Any = load_env_cfg(task)
    config.scene.num_envs, config.seed = num_envs, seed
    env = RslRlVecEnvWrapper(ManagerBasedRlEnv(config, device))
    return RslRlEnv(env, clip_actions, split_groups(obs_groups), split_groups(critic_groups))
