"""The settings of mode `ray`. This module does not need Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass

from freerun.collecting.modes.freerun import FreerunConfig
from freerun.core import Common, Demand, ModeOptions, UserError

MOST_SPARES = 4
"""The default number of spare workers does not exceed this, because each takes about 100 MB."""


@dataclass(frozen=True)
class RayConfig(ModeOptions):
    """Mode `ray`: which cluster, and what its workers are."""

    ray_address: Common[str] = "local"
    """local starts a private Ray on this machine; auto takes the cluster that this machine belongs to; HOST:PORT or
    ray://HOST:PORT name one. docs/cluster.md shows how to start one that is safe."""
    cpus_per_worker: float = 0.1
    """What the cluster reserves for a worker: 1 for environments that compute, little for those that mostly wait."""
    ray_runtime_env: str | None = None
    """Your own code on other machines: a folder, or a JSON file with Ray's runtime_env."""
    spare_workers: int | None = None
    """Spare processes, so that a worker that fails is replaced at once (on a private Ray as many as there are
    workers, 4 at most; elsewhere none)."""
    envs_per_worker: Common[int] = 1
    """Environments that a worker steps in turn, with one call of the policy for all: for environments that are fast."""
    segment_steps: int | None = None
    """Hand over this many steps of all of a worker's environments at a time; 0 hands over whole episodes (if not given:
    whole episodes of up to 4 environments at once, and segments of more where that keeps them busy)."""

    def __post_init__(self) -> None:
        self._task  # noqa: B018 - it checks itself
        if self.cpus_per_worker < 0:
            raise UserError(f"--cpus-per-worker must be 0 or more, not {self.cpus_per_worker}")
        if self.spare_workers is not None and self.spare_workers < 0:
            raise UserError(f"--spare-workers must be 0 or more, not {self.spare_workers}")
        if self.ray_address not in ("local", "auto") and not re.fullmatch(r"(ray://)?[^/]+:\d+", self.ray_address):
            raise UserError(
                f"--ray-address is local, auto, HOST:PORT or ray://HOST:PORT, not {self.ray_address!r}; the ports are "
                "6379 and 10001 where nothing else was said"
            )

    def num_spares(self, num_workers: int, is_private: bool) -> int:
        if self.spare_workers is not None:
            return self.spare_workers
        return min(num_workers, MOST_SPARES) if is_private else 0

    @property
    def _task(self) -> FreerunConfig:
        return FreerunConfig(self.envs_per_worker, self.segment_steps)

    def check(self, demand: Demand) -> None:
        """Raise if an algorithm that demands this cannot be served."""
        self._task.check(demand)
