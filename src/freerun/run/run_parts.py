"""The parts of a run, as `experiment.run` puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freerun.core import Algorithm, Collector, EnvSpaces
from freerun.persistence.incidents import IncidentFile
from freerun.settings.config import TrainConfig
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.transport.state_tracks import SharedTracks


@dataclass(frozen=True)
class RunParts:
    """Everything that the training loop works with, and that outputs report on."""

    config: TrainConfig[Any, Any]
    settings: Mapping[str, Any]
    """The settings by their flat names, as config.json has them."""
    spaces: EnvSpaces
    """The spaces of the environment as its author wrote them."""
    algorithm: Algorithm
    collector: Collector
    ledger: Ledger
    budget: Budget
    tracks: SharedTracks
    incidents: IncidentFile
    startup_seconds: float
    """How long it took to start the workers."""
