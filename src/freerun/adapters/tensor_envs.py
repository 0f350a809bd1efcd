"""Builds environments that are tensors: thousands of them stepped as one batch, on the learner's device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from freerun.adapters.catalog import TENSOR_ENVS
from freerun.adapters.images import image_shape
from freerun.core import EnvSpaces, EnvSpec, Metrics, TensorEnv, TensorStep, UserError, import_callable

if TYPE_CHECKING:
    from torch import Tensor

GIVEN = "object:"
FAMILY = ("-", ":")
"""A key of `TENSOR_ENVS` that ends with one of these stands for all names that begin with it."""


def find_builder(env: object) -> str | None:
    """The builder of a tensor environment, as module:callable; None for a name of any other environment."""
    if not isinstance(env, str):
        return None
    for name, builder in TENSOR_ENVS.items():
        if env == name or (name.endswith(FAMILY) and env.startswith(name)):
            return builder
    return None


def is_only_tensors(env: object) -> bool:
    """Whether it can be stepped as tensors alone. freerun's own simulators are Gymnasium environments, too."""
    return find_builder(env) is not None and env not in TENSOR_ENVS


_given: dict[str, Any] = {}
"""Environments that a Python caller has made, by the names that `give` has made up for them."""


def give(env: Any) -> str:
    """Register a `core.TensorEnv` or an RSL-RL VecEnv that exists already, and return a name for it."""
    name = f"{GIVEN}{type(env).__name__}"
    _given[name] = env
    return name


def take(name: str, num_envs: int, device: str, seed: int, **env_args: Any) -> TensorEnv:
    """The builder of an environment that `give` has registered. Device and seed were chosen by its maker."""
    if name not in _given:
        raise UserError(f"{name} was made in Python: call freerun.train() with it again")
    env = _given[name]
    if env.num_envs != num_envs:
        raise UserError(
            f"{name} has {env.num_envs} environments, not {num_envs}; leave out num_envs, and num_collectors"
        )
    if not hasattr(env, "get_observations"):  # what every RSL-RL VecEnv has, and no `core.TensorEnv`
        return env  # type: ignore[no-any-return]
    from freerun.adapters.rsl_rl_env import RslRlEnv

    return RslRlEnv(env, **env_args)


class TensorEnvs:
    """The tensor environments of a run, in one equal share per collector.

    The constructor builds them at once, because a simulator must stay on the thread that has made it."""

    def __init__(
        self,
        env: str,
        num_envs: int,
        num_shares: int,
        device: str,
        seed: int,
        env_args: Mapping[str, Any],
        policy_group_only: bool = False,
        ignore_masks: bool = False,
    ):
        """With `policy_group_only`, what only the value function may see is left out of the observations, and with
        `ignore_masks` the masks of actions."""
        builder = find_builder(env)
        assert builder is not None
        if num_envs % num_shares:
            raise UserError(
                f"--num-envs {num_envs} cannot be shared out evenly among {num_shares} collectors: "
                "make it a multiple of --num-collectors"
            )
        build = import_callable(builder, "environment")
        self.envs: list[TensorEnv] = [
            # A seed for each share: with the same one they would simulate the same episodes.
            build(env, num_envs=num_envs // num_shares, device=device, seed=seed + share, **env_args)
            for share in range(num_shares)
        ]
        spec = self.envs[0].spec
        self.hides_critic_group = policy_group_only and spec.has_critic_group
        self.hides_masks = ignore_masks and spec.has_mask
        if self.hides_critic_group or self.hides_masks:
            self.envs = [CutDownEnv(env, not policy_group_only, not ignore_masks) for env in self.envs]
        self.spec: EnvSpec = self.envs[0].spec
        self.image_shape = image_shape(self.spec.policy_space)
        self.spaces = EnvSpaces(self.spec.policy_space, self.spec.action_space)


class CutDownEnv:
    """A tensor environment without what an algorithm has no use for: the critic's group, or the masks of actions."""

    def __init__(self, env: TensorEnv, keeps_critic: bool, keeps_mask: bool):
        self._env = env
        self.spec = env.spec.cut_down(keeps_critic, keeps_mask)
        self.num_envs, self.device, self.is_capturable = env.num_envs, env.device, env.is_capturable
        self.is_elsewhere: bool = getattr(env, "is_elsewhere", False)
        self.reset_begins_episodes: bool = getattr(env, "reset_begins_episodes", True)
        self._shape = self.spec.observation_space.shape
        self._columns = _columns(env.spec, keeps_critic, keeps_mask)
        from torch import cat  # not above: `freerun list` does without torch

        self._join = cat

    def reset(self) -> Tensor:
        return self._seen(self._env.reset())

    def begin_whole_episodes(self) -> Tensor:
        return self._seen(getattr(self._env, "begin_whole_episodes", self._env.reset)())

    def step(self, action: Tensor) -> TensorStep:
        result = self._env.step(action)
        return result._replace(obs=self._seen(result.obs), final_obs=self._seen(result.final_obs))

    def metrics(self) -> Metrics:
        return self._env.metrics()

    def close(self) -> None:
        self._env.close()

    def _seen(self, rows: Tensor) -> Tensor:
        parts = [rows[:, columns] for columns in self._columns]
        return (parts[0] if len(parts) == 1 else self._join(parts, dim=1)).reshape(-1, *self._shape)


def _columns(spec: EnvSpec, keeps_critic: bool, keeps_mask: bool) -> list[slice]:
    """Where the groups that are kept stand in a row."""
    assert spec.obs_groups is not None
    kept, start = [], 0
    for group, is_kept in zip(spec.obs_groups, (True, keeps_critic, keeps_mask), strict=True):
        end = start + (0 if group is None else math.prod(group.shape))
        if is_kept and end > start:
            kept.append(slice(start, end))
        start = end
    return kept
