"""The parts of a run, as `experiment.run` puts them together, and summary.json: how they did, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freerun.core import Algorithm, Collector, EnvSpaces
from freerun.persistence.incidents import IncidentFile
from freerun.settings.config import AnyConfig
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.transport.state_tracks import SharedTracks

SUMMARIZED_SETTINGS = ("mode", "algo", "env", "seed", "num_workers", "num_learners")


@dataclass(frozen=True)
class RunParts:
    """Everything that the training loop works with, and that outputs report on."""

    config: AnyConfig
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
    act_seconds: float = 0.0
    """How long a worker's policy takes for one action; 0 if workers choose none."""


def summarize(parts: RunParts, outcome: str, error: str | None, wall_seconds: float) -> dict[str, Any]:
    """Return the figures of a run that has ended. The keys are part of the file format."""
    ledger, counts = parts.ledger, parts.collector.counts()
    return {
        "outcome": outcome,
        **({} if error is None else {"error": error}),
        **{name: parts.settings[name] for name in SUMMARIZED_SETTINGS},
        "startup_seconds": parts.startup_seconds,
        "env_steps": ledger.steps,
        "episodes": ledger.episodes,
        "updates": ledger.version,
        "wall_seconds": wall_seconds,
        "steps_per_second": ledger.steps / wall_seconds,
        "episodes_per_second": ledger.episodes / wall_seconds,
        "mean_return": ledger.mean_return if ledger.episodes else None,
        "lag_mean": ledger.lag_mean,
        "lag_max": ledger.lag_max,
        "dropped_steps": counts.steps_dropped,
        "dropped_steps_by_worker": _with_text_keys(counts.steps_dropped_by_worker),
        "dropped_steps_by_length": _with_text_keys(counts.steps_dropped_by_length),
        "drop_bias": counts.drop_bias,
        "segments_rejected": counts.segments_rejected,
        "worker_restarts": counts.worker_restarts,
        "incidents": dict(parts.incidents.by_kind),
        "ledger": ledger.summary(counts),
    }


def _with_text_keys(steps: Mapping[int, int]) -> dict[str, int]:
    """JSON has no numbers as keys."""
    return {str(key): value for key, value in steps.items()}
