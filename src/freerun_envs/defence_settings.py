"""The settings of the cyber-defence environments: who attacks, for how long, and in which order hosts are mended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import gymnasium
import tyro

from freerun.core import Baseline, Common, EnvSettings, EnvTarget, Metrics, UserError, require_positive
from freerun_envs.defenders import DEFENDERS, Defender, play
from freerun_envs.workflow import DEFAULT_COMPLIANCE_WEIGHT, SEPARATOR, WorkflowEnv, read_order

RedAgent = Literal["B_lineAgent", "RedMeanderAgent", "SleepAgent"]


@dataclass(frozen=True)
class DefenceSettings(EnvSettings):
    """Cyber defence: the attacker, the length of an episode, and workflows."""

    series_fields: ClassVar[tuple[str, ...]] = ("workflow", "workflows")
    trial_columns: ClassVar[Mapping[str, str]] = {"trial_return": "{:.1f}", "compliance": "{:.0%}"}
    env_arguments: ClassVar[tuple[str, ...]] = ("red_agent", "episode_steps")
    """The settings that are arguments of the environment itself."""

    red_agent: Common[RedAgent | None] = None
    """Who attacks (B_lineAgent if not given)."""
    episode_steps: Common[int | None] = None
    """Steps of an episode (100 if not given)."""
    workflow: Common[Annotated[tuple[str, ...], tyro.conf.UseAppendAction]] = ()
    """Whom to mend first, as defender,enterprise,op_server,op_host,user in any order. The flag may be given several
    times: the same workers then train one workflow after another."""
    workflows: Path | None = None
    """A file with one workflow per line."""
    compliance_weight: float | None = None
    """What keeping to the workflow is worth beside the environment's reward (10 if not given)."""

    def __post_init__(self) -> None:
        require_positive(self, "episode_steps")
        if self.workflow and self.workflows is not None:
            raise UserError("give --workflow or --workflows, not both")
        if self.compliance_weight is not None and not (self.workflow or self.workflows):
            raise UserError("--compliance-weight needs a --workflow to comply with")

    def orders(self) -> tuple[str, ...]:
        """Return the workflows to train, from the flags or from the file."""
        if self.workflows is None:
            return self.workflow
        try:
            lines = self.workflows.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read --workflows {self.workflows}: {error}") from None
        found = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not found:
            raise UserError(f"--workflows {self.workflows} names no workflow: write one per line")
        return found

    def recipe(self, env: EnvTarget, env_args: Mapping[str, Any]) -> tuple[EnvTarget, dict[str, Any]]:
        values = {name: getattr(self, name) for name in self.env_arguments}
        given = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        given = {name: value for name, value in given.items() if value is not None}
        trainings = self.series()
        if not trainings:
            return env, {**env_args, **given}
        weight = DEFAULT_COMPLIANCE_WEIGHT if self.compliance_weight is None else self.compliance_weight
        workflow = {"env_id": env, "workflows": SEPARATOR.join(trainings), "compliance_weight": weight}
        return WorkflowEnv, {**workflow, **env_args, **given}

    def series(self) -> Mapping[str, EnvSettings]:
        names = [",".join(read_order(order)) for order in self.orders()]  # without spaces, and each of them once
        return {name: dataclasses.replace(self, workflow=(name,), workflows=None) for name in names}

    def trial_figures(self, env: gymnasium.Env[Any, Any], episode_return: float) -> Metrics:
        """The return without the shaping reward, and how far the policy kept to the workflow."""
        assert isinstance(env, WorkflowEnv)
        share = env.compliance.share
        # The shaping rewards of an episode are a telescoping sum: weight * (share at the end - share at the start = 1).
        return {"trial_return": episode_return - env.weight * (share - 1), "compliance": share}

    def baselines(self) -> Mapping[str, Baseline]:
        return {name: _baseline(defender) for name, defender in DEFENDERS.items()}


def _baseline(defender: Defender) -> Baseline:
    return lambda env, seed, num_episodes: play(env, defender, seed, num_episodes)
