"""The settings of `--adapt`: whether a run tunes itself, and how far it may go."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from freerun.core import UserError


@dataclass(frozen=True)
class AdaptConfig:
    """Self-tuning while a run goes on (docs/adapting.md)."""

    adapt: bool = False
    """Move workers, environments per worker, queue and batches towards more steps per second while the run goes on;
    what does not help is undone. Every change is told in adapting.jsonl."""
    adapt_max_workers: int | None = None
    """Most workers or collectors (if not given: 32 per core, 256 at most, and as many as there is memory for)."""
    adapt_max_envs_per_worker: int | None = None
    """Most environments per worker, in --mode freerun without --segment-steps (if not given: 8)."""
    adapt_max_queue_size: int | None = None
    """Longest queue, in --mode continuous and batch (if not given: the configured one, and at least 64)."""
    adapt_max_minibatch: int | None = None
    """Let minibatches grow up to this; it changes what is learned, so they stay as they are if not given."""
    adapt_min_update_ratio: float | None = None
    """Let epochs (PPO) or updates per step (SAC, MBPO) fall down to this; they stay as they are if not given."""
    adapt_window: float = 3.0
    """Seconds, at least, over which the speed is measured before and after a change."""

    def __post_init__(self) -> None:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        if not self.adapt and given:
            raise UserError(f"--{given[0].replace('_', '-')} is a bound of --adapt: give that too")
        for name in given:
            value = getattr(self, name)
            if name == "adapt_min_update_ratio" or name == "adapt_window":
                if value <= 0:
                    raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
            elif value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
