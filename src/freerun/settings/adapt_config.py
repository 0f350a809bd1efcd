"""The settings of `--adapt`: whether a run tunes itself, and how far."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from freerun.core import UserError


@dataclass(frozen=True)
class AdaptConfig:
    """Self-tuning during a run (docs/adapting.md)."""

    adapt: bool = False
    """Change the number of workers, environments per worker, queue and batches during the run, for more steps per
    second. A change that does not help is undone. adapting.jsonl lists every change."""
    adapt_max_workers: int | None = None
    """The largest number of workers or collectors (if not given: 32 per core, at most 256, and as many as fit into
    memory)."""
    adapt_max_envs_per_worker: int | None = None
    """The largest number of environments per worker, in --mode freerun without --segment-steps (if not given: 8)."""
    adapt_max_queue_size: int | None = None
    """The longest queue, in --mode continuous and batch (if not given: the configured one, and at least 64)."""
    adapt_max_minibatch: int | None = None
    """Let minibatches grow up to this size. It changes what is learned, so they do not grow if it is not given."""
    adapt_min_update_ratio: float | None = None
    """Let epochs (PPO) or updates per step (SAC, MBPO) fall to this number. They do not fall if it is not given."""
    adapt_window: float = 3.0
    """The least number of seconds over which the speed is measured before and after a change."""

    def __post_init__(self) -> None:
        # A bound without --adapt is a mistake, because it would do nothing.
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
