"""The limits of a run, and how much of them is used up."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from freerun.core import Demand
from freerun.telemetry.ledger import Ledger

logger = logging.getLogger("freerun")


@dataclass(frozen=True)
class Budget:
    """Says when a run is over: as soon as one of its limits is reached."""

    total_steps: int | None
    total_episodes: int | None

    def progress(self, ledger: Ledger) -> float:
        """Return the share of the budget that is used up, from 0 to 1."""
        # Broken episodes count too: otherwise a mode that drops steps might never reach its number of episodes.
        steps = ledger.steps / self.total_steps if self.total_steps else 0.0
        episodes = (ledger.episodes + ledger.num_broken) / self.total_episodes if self.total_episodes else 0.0
        return min(1.0, max(steps, episodes))

    def allows(self, asked: Demand, missing: Demand, ledger: Ledger) -> bool:
        """True if more may be collected for the next update. `asked` was the demand before data came, `missing` after.

        A run that has used up its budget may still complete its last update, but only while each collection brings it
        nearer. A demand is a whole number that can shrink only finitely often, so no algorithm keeps a run going for
        ever.
        """
        # A demand names episodes or steps, so their sum is the size of whichever it names.
        if self.progress(ledger) < 1.0 or missing.episodes + missing.steps < asked.episodes + asked.steps:
            return True
        wanted = f"{missing.episodes:,} episodes" if missing.episodes else f"{missing.steps:,} steps"
        logger.warning(
            "the run ends after %s steps without another update: its budget is spent, and the algorithm still demands "
            "%s, no fewer than before the last ones arrived",
            f"{ledger.steps:,}",
            wanted,
        )
        return False

    def steps_left(self, ledger: Ledger) -> int | None:
        """Return how many steps are left until --total-steps is reached; None if the run has no such limit."""
        return None if self.total_steps is None else max(0, self.total_steps - ledger.steps)

    def within(self, demand: Demand, ledger: Ledger) -> Demand:
        """Return the demand, limited to the steps that are left: the last update of a run may learn from fewer."""
        left = self.steps_left(ledger)
        return demand if left is None else replace(demand, steps=min(demand.steps, left), steps_left=left)
