"""Environments that are tensors, by name: thousands of them stepped as one batch, on the learner's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freerun.core import EnvSpec, TensorEnv, UserError, import_callable
from freerun.envs import TENSOR_ENVS

GIVEN = "object:"
FAMILY = ("-", ":")
"""What names end with that stand for all that begin so."""


def find_builder(env: Any) -> str | None:
    """What builds it, as module:callable; None if it is an environment like any other."""
    if not isinstance(env, str):
        return None
    for name, builder in TENSOR_ENVS.items():
        if env == name or (name.endswith(FAMILY) and env.startswith(name)):
            return builder
    return None


def is_only_tensors(env: Any) -> bool:
    """Whether no other mode can step it: those of another system's are, while freerun's own are Gymnasium's too."""
    return find_builder(env) is not None and env not in TENSOR_ENVS


_given: dict[str, Any] = {}
"""Environments that were made elsewhere, by the names that they have got here."""


def give(env: Any) -> str:
    """A name for a `core.TensorEnv` or an RSL-RL VecEnv that is there already."""
    name = f"{GIVEN}{type(env).__name__}"
    _given[name] = env
    return name


def take(name: str, num_envs: int, device: str, seed: int, **env_args: Any) -> TensorEnv:
    """The builder of such: it is there, with as many environments as it has, and begun as its maker saw fit."""
    if name not in _given:
        raise UserError(f"{name} was made in Python: call freerun.train() with it again")
    env = _given[name]
    if env.num_envs != num_envs:
        raise UserError(
            f"{name} has {env.num_envs} environments, not {num_envs}; leave out num_envs, and num_collectors"
        )
    if not hasattr(env, "get_observations"):
        return env  # type: ignore[no-any-return]
    from freerun.envs.rsl_rl import RslRlEnv

    return RslRlEnv(env, **env_args)


class TensorEnvs:
    """The environments of a run, in equal shares. They are made here and now: a simulator stays on its first thread."""

    def __init__(self, env: str, num_envs: int, num_shares: int, device: str, seed: int, env_args: Mapping[str, Any]):
        builder = find_builder(env)
        assert builder is not None
        if num_envs % num_shares:
            raise UserError(
                f"--num-envs {num_envs} cannot be shared out evenly among {num_shares} collectors: "
                "make it a multiple of --num-collectors"
            )
        build = import_callable(builder, "environment")
        self.envs: list[TensorEnv] = [
            build(env, num_envs=num_envs // num_shares, device=device, seed=seed + place, **env_args)
            for place in range(num_shares)
        ]
        self.spec: EnvSpec = self.envs[0].spec
