"""Environments that are tensors, by name: thousands of them stepped as one batch, on the learner's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freerun.core import EnvSpec, TensorEnv, UserError, import_callable
from freerun.envs import TENSOR_ENVS


def find_builder(env: Any) -> str | None:
    """What builds it, as module:callable; None if it is an environment like any other."""
    if not isinstance(env, str):
        return None
    for name, builder in TENSOR_ENVS.items():
        if env == name or (name.endswith(("-", ":")) and env.startswith(name)):
            return builder
    return None


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
