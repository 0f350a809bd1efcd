"""`sync`: a process per environment behind Gymnasium's AsyncVectorEnv. Every step waits for the slowest."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from freerun.collectors.inline import Inline
from freerun.core import CollectorSettings, EnvFactory, ModeOptions, Policy, UserError, require_positive


@dataclass(frozen=True)
class SyncConfig(ModeOptions):
    """Mode `sync` with environments that are tensors."""

    num_envs: int | None = None
    """Environments that are tensors: how many (64 if not given). Others have a process each: --num-workers."""
    num_steps_per_env: int | None = None
    """Environments that are tensors: steps of each before the learner's turn (24 if not given)."""

    def __post_init__(self) -> None:
        require_positive(self, "num_envs", "num_steps_per_env")

    @property
    def unit_steps(self) -> int | None:
        return self.num_envs * self.num_steps_per_env if self.num_envs and self.num_steps_per_env else None


class Sync(Inline):
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: SyncConfig):
        if config.num_envs is not None or config.num_steps_per_env is not None:
            raise UserError(
                "--num-envs and --num-steps-per-env of --mode sync are for environments that are tensors: this one "
                "gets a process for each, so give --num-workers"
            )
        make = functools.partial(factory.make_parallel, settings.num_workers, settings.tracks, settings.step_timeout)
        super().__init__(make, policy, settings)
