"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass

from freerun.telemetry.ledger import Ledger


@dataclass(frozen=True)
class Budget:
    """When a run is over: whichever limit comes first."""

    total_steps: int | None
    total_episodes: int | None

    def progress(self, ledger: Ledger) -> float:
        """From 0 to 1."""
        steps = ledger.steps / self.total_steps if self.total_steps else 0.0
        episodes = (ledger.episodes + ledger.broken) / self.total_episodes if self.total_episodes else 0.0
        return min(1.0, max(steps, episodes))
