"""Weights & Biases, online or offline. Runs of one task form a group, so that modes can be compared."""

from __future__ import annotations

from collections.abc import Mapping

from freerun.core import RequiredPackage, TrackerTraits, UserError
from freerun.telemetry.metric_tags import finite_tags
from freerun.telemetry.tracking import TrackedRun


class WeightsAndBiases:
    """A sink that logs to Weights & Biases."""

    traits = TrackerTraits(
        description="Weights & Biases, online or offline",
        package=RequiredPackage("wandb", "Weights & Biases", "wandb"),
        destination_setting="wandb_entity",
    )

    def __init__(self, run: TrackedRun):
        import wandb  # here and not above: `freerun list` reads the traits, and the import takes a second

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
                # x_disable_meta keeps W&B from recording the command line, which may hold secrets.
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_stats=True, x_disable_meta=run.has_secrets
                ),
            )
        except wandb.Error as error:  # no login or no network, for example: one sentence instead of a traceback
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"--track wandb: {reason}; run `wandb login`, or use --wandb-mode offline and `wandb sync` later"
            ) from None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**finite_tags(metrics), "env_step": step}, step=step)

    def close(self) -> None:
        self._run.finish()
