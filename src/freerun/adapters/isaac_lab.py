"""Isaac Lab's tasks as a `core.TensorEnv`. Before this module is imported, `isaac_launch` has started the simulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from freerun.adapters import isaac_launch
from freerun.adapters.isaac_process import IsaacLabProcess
from freerun.adapters.space_adapter import CRITIC_GROUP, POLICY_GROUP
from freerun.adapters.step_log import StepLog
from freerun.core import ActionSpace, EnvSpec, Metrics, ObsGroups, TensorStep, UserError


def make(task: str, num_envs: int | None, device: str, seed: int, **settings: Any) -> IsaacLabEnv | IsaacLabProcess:
    """Environments of a task: in this process, or in another process if this one simulates already."""
    builder = IsaacLabProcess if isaac_launch.is_taken() else make_here
    return builder(task, num_envs, device, seed, **settings)


def make_here(
    task: str,
    num_envs: int | None,
    device: str,
    seed: int,
    headless: bool = True,
    clip_actions: float | None = None,
    **settings: Any,
) -> IsaacLabEnv:
    """Environments of a task in this process. `settings` are those of `isaac_launch.launch`."""
    isaac_launch.launch(task, num_envs, device, headless, seed, **settings)
    simulation = isaac_launch.take()
    with isaac_launch.explained(task):  # making the environments loads the task's files
        env = gymnasium.make(task.removeprefix(isaac_launch.ANY_NAME), cfg=simulation.config)
    return IsaacLabEnv(env, clip_actions)


class IsaacLabEnv:
    """A task of Isaac Lab. The policy sees its "policy" observations, and the value function "critic", if there are."""

    is_capturable = False

    def __init__(self, env: gymnasium.Env[Any, Any], clip_actions: float | None = None):
        self._env: Any = env  # Gymnasium's types describe a single environment, not a batch of tensors
        sim: Any = env.unwrapped
        self.sim = sim
        """The task itself, as Isaac Lab has made it: its config, its scene, its buffers."""
        if hasattr(sim, "possible_agents"):
            raise UserError("this task has several agents, and freerun trains one: choose another task")
        config = sim.cfg
        self.num_envs: int = sim.num_envs
        self.device = torch.device(sim.device)
        actions = _actions(sim.single_action_space, clip_actions)
        reports_final_obs = bool(getattr(config, "compute_final_obs", False))
        groups = _observations(sim.single_observation_space)
        if isinstance(groups, ObsGroups):
            self.spec = EnvSpec.of_groups(groups, actions, reports_final_obs)
        else:
            self.spec = EnvSpec(groups, actions, reports_final_obs)
        # A finite horizon is part of the task, so nothing is bootstrapped from its last state.
        self._time_out_terminates = bool(getattr(config, "is_finite_horizon", False))
        self._limits: tuple[Tensor, Tensor] | None = None
        if isinstance(space := self.spec.action_space, spaces.Box) and space.is_bounded():
            low, high = (torch.from_numpy(limit).to(self.device) for limit in (space.low, space.high))
            self._limits = low, high
        self._log = StepLog()

    def reset(self) -> Tensor:
        obs, _ = self._env.reset()  # its seed is in its config
        return self._row(obs).clone()

    def step(self, action: Tensor) -> TensorStep:
        """One step. The result is cloned, because the simulator overwrites some of its tensors in the next step."""
        extras = self.sim.extras
        # Isaac Lab never clears its extras, so an entry of an earlier step would be taken for one of this step.
        extras.pop("final_obs", None)
        self._log.clear(extras)
        obs, reward, terminated, truncated, extras = self._env.step(self._convert(action))
        self._log.add(extras)
        terminated, truncated = terminated.clone(), truncated & ~terminated
        if self._time_out_terminates:
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        new_policy_obs, obs = _policy_obs(obs), self._row(obs)
        final_obs = obs.clone()
        if self.spec.reports_final_obs and "final_obs" in extras:  # only in steps in which an episode has ended
            last = self._row(extras["final_obs"])
            # The same memory: the reset has overwritten the final observations.
            if _policy_obs(extras["final_obs"]).data_ptr() == new_policy_obs.data_ptr():
                raise RuntimeError(
                    "the task writes all its observations into one buffer, so the last ones of an episode are lost: "
                    "give --env-args compute_final_obs False"
                )
            final_obs = torch.where((terminated | truncated).view(-1, *[1] * (obs.dim() - 1)), last, obs)
        return TensorStep(obs.clone(), final_obs, reward.clone(), terminated, truncated)

    def metrics(self) -> Metrics:
        """Means of what the task has put in `extras["log"]` since the last call."""
        return self._log.read()

    def close(self) -> None:
        """Close the environments. The simulator's app, if there is one, ends with the process (`isaac_launch.stop`)."""
        self._env.close()

    def _row(self, obs: Any) -> Tensor:
        """The observations as `spec` has them: of the policy, or the rows of both groups."""
        if self.spec.obs_groups is None:
            return _policy_obs(obs)
        return torch.cat([obs[name].flatten(1) for name in (POLICY_GROUP, CRITIC_GROUP)], dim=1)

    def _convert(self, action: Tensor) -> Tensor:
        if isinstance(self.spec.action_space, spaces.Discrete):
            return action.view(-1, 1)  # Isaac Lab expects one column
        return action if self._limits is None else action.clamp(*self._limits)


def _policy_obs(obs: Any) -> Tensor:
    found: Tensor = obs[POLICY_GROUP] if isinstance(obs, dict) else obs
    return found


def _observations(space: Any) -> spaces.Box | ObsGroups:
    """The spaces of the "policy" observations and, where the task has them, of the "critic" observations."""
    if not isinstance(space, spaces.Dict):
        return _vector(POLICY_GROUP, space)
    policy = _vector(POLICY_GROUP, space[POLICY_GROUP])
    has_critic = CRITIC_GROUP in space.spaces
    return ObsGroups(policy, _vector(CRITIC_GROUP, space[CRITIC_GROUP])) if has_critic else policy


def _vector(group: str, space: Any) -> spaces.Box:
    """The space of one group, which must be a Box."""
    if isinstance(space, spaces.Dict):
        raise UserError(
            f"the task's {group} observations are separate terms ({', '.join(space)}), and freerun takes one vector: "
            f"give --env-args observations.{group}.concatenate_terms True"
        )
    if not isinstance(space, spaces.Box):
        raise UserError(f"freerun takes observations in a Box, and the task's {group} observations are {space}")
    return space


def _actions(space: Any, clip_actions: float | None) -> ActionSpace:
    """The task's action space. Isaac Lab sets no limits; algorithms that need some get those of `clip_actions`."""
    if clip_actions is not None:
        if not isinstance(space, spaces.Box) or clip_actions <= 0:
            raise UserError(f"--env-args clip_actions must be above 0 and for actions in a Box, which here are {space}")
        return spaces.Box(-clip_actions, clip_actions, space.shape, np.float32)
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete):
        raise UserError(f"freerun takes actions in a Box, Discrete or MultiDiscrete, and the task's are {space}")
    return space
