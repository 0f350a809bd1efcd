"""Algorithms of which one update never ends, as long as a file is there: to be interrupted in the middle of it.

`--algo endless_updates:EndlessPPO`; the file's name is in the environment variable ENDLESS_UPDATE. It holds the version
from which on updates are endless; a file beside it, with `-begun` added to its name, says that one goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from freerun.algorithms.mbpo.dynamics import EnsembleTraining
from freerun.algorithms.mbpo.mbpo import MBPO
from freerun.algorithms.mbpo.mbpo_config import MBPOConfig
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.sac.sac import SAC
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.core import Metrics


def is_endless(version: int) -> bool:
    path = Path(os.environ["ENDLESS_UPDATE"])
    if not path.exists() or int(path.read_text()) > version:
        return False
    Path(f"{path}-begun").touch()
    return True


class EndlessPPO(PPO):
    """Gradient steps of one epoch after another."""

    Config = PPOConfig

    def update(self, version: int, progress: float) -> Metrics:
        self._version = version
        return super().update(version, progress)

    def _minibatches(self, num_rows: int) -> Iterator[Tensor]:
        yield from super()._minibatches(num_rows)
        while is_endless(self._version):
            yield from super()._minibatches(num_rows)


class EndlessSAC(SAC):
    Config = SACConfig

    def update(self, version: int, progress: float) -> Metrics:
        while is_endless(version):
            self.take_gradient_steps(100)
        return super().update(version, progress)


class EndlessMBPO(MBPO):
    """Its model is trained for ever."""

    Config = MBPOConfig

    def update(self, version: int, progress: float) -> Metrics:
        self._version = version
        return super().update(version, progress)

    def _fit(self) -> EnsembleTraining:
        while is_endless(self._version):
            self.dynamics.fit(10)
        return super()._fit()
