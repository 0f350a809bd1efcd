"""Weights & Biases, online or offline. Runs of one task are a group, so that modes can be compared."""

from __future__ import annotations

from collections.abc import Mapping

from freerun.core import UserError
from freerun.telemetry.tags import finite_tags
from freerun.telemetry.tracking import TrackedRun

try:
    import wandb
except ModuleNotFoundError:
    raise UserError("--track wandb needs Weights & Biases: pip install 'freerun[wandb]'") from None


class WeightsAndBiases:
    def __init__(self, run: TrackedRun):
        config, options = run.config, run.tracking
        try:
            self._run = wandb.init(
                project=options.wandb_project,
                entity=options.wandb_entity,
                group=options.wandb_group or f"{config['env']} {config['algo']}",
                job_type=config["mode"],
                name=run.path.name,
                config=dict(config),
                dir=str(run.path),
                mode=options.wandb_mode,
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_stats=True, x_disable_meta=run.has_secrets
                ),
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"--track wandb: {reason}; run `wandb login`, or use --wandb-mode offline and `wandb sync` later"
            ) from None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**finite_tags(metrics), "env_step": step}, step=step)

    def close(self) -> None:
        self._run.finish()
