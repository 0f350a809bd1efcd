"""What a tracker (TensorBoard, W&B, Prometheus) gets to know about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from freerun.core import Common, UserError


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go besides the run folder."""

    track: Common[Annotated[tuple[str, ...], tyro.conf.UseAppendAction]] = ()
    """Send metrics to tensorboard, wandb or prometheus too, or to your own tracker as module:Class (the flag may be
    given again)."""
    wandb_project: str = "freerun"
    """Project at Weights & Biases."""
    wandb_entity: str | None = None
    """User or team there (your default if not given)."""
    wandb_group: str | None = None
    """Runs to compare with each other (environment and algorithm if not given: so modes stand side by side)."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline writes into the run folder; `wandb sync` sends it later."""
    prometheus_host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines read the metrics."""
    prometheus_port: int = 9108
    """Port of the endpoint /metrics."""

    def __post_init__(self) -> None:
        if not 0 <= self.prometheus_port < 65536:
            raise UserError(f"--prometheus-port must lie between 0 and 65535, not {self.prometheus_port}")


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker sees it when it is built."""

    path: Path
    config: Mapping[str, Any]
    """All settings by flat names, as in config.json, without secrets."""
    tracking: TrackingConfig
    has_secrets: bool = False
    """True if secrets were left out of the settings. The tracker must not record the command line then: it has them."""
