"""`sync`: a process per environment behind Gymnasium's AsyncVectorEnv. Every step waits for the slowest."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from freerun.collecting.modes.inline_collector import InlineCollector
from freerun.core import (
    CollectorSettings,
    Common,
    EnvFactory,
    ModeOptions,
    ModeTraits,
    Pacing,
    Policy,
    Predictor,
    ProbeModel,
    TensorVariant,
    UserError,
    require_positive,
)


@dataclass(frozen=True)
class SyncConfig(ModeOptions):
    """Mode `sync`: where its policy acts, and environments that are tensors."""

    num_envs: Common[int | None] = None
    """The number of environments that are tensors (64 if not given). Others have a process each: --num-workers."""
    num_steps_per_env: int | None = None
    """Steps of each environment, where they are tensors, before the learner's turn (24 if not given)."""

    act_on_device: bool = False
    """Choose the actions of all environments in one batch, on the learner's --device: for networks that are too slow
    for a CPU (docs/images.md)."""

    def __post_init__(self) -> None:
        require_positive(self, "num_envs", "num_steps_per_env")
        if self.act_on_device and self.num_envs is not None:
            raise UserError("the policy of environments that are tensors is on their device: leave --act-on-device out")

    @property
    def acts_on_device(self) -> bool:
        return self.act_on_device

    @property
    def unit_steps(self) -> int | None:
        return self.num_envs * self.num_steps_per_env if self.num_envs and self.num_steps_per_env else None

    def envs_at_once(self, num_workers: int) -> int:
        return self.num_envs or num_workers


class Sync(InlineCollector):
    """One rollout over parallel environments, in the learner's thread."""

    traits = ModeTraits(
        description="a process per environment, all stepped together: waits for the slowest at every step",
        options=SyncConfig,
        pacing=Pacing.TAKES_TURNS,
        lockstep=True,
        tensors=TensorVariant(
            "freerun.collecting.tensors.tensor_modes:TensorSync",
            defaults={"num_envs": 64, "num_steps_per_env": 24},
            own_settings=("num_envs", "num_steps_per_env"),
        ),
        preference=4,
        probe=ProbeModel(Predictor.LOCKSTEP),
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: SyncConfig):
        if config.num_envs is not None or config.num_steps_per_env is not None:
            raise UserError(
                "--num-envs and --num-steps-per-env of --mode sync are for environments that are tensors: this one "
                "gets a process for each, so give --num-workers"
            )
        make = functools.partial(factory.make_parallel, settings.num_workers, settings.tracks, settings.step_timeout)
        super().__init__(make, policy, settings)
