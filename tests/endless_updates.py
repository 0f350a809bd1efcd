"""Algorithms of which one update never ends, as long as a file is there: to be interrupted in the middle of it.

`--algo endless_updates:EndlessPPO`; the file's name is in the environment variable ENDLESS_UPDATE. It holds the version
from which on updates are endless; a file beside it, with `-begun` added to its name, says that one goes on.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

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
        if is_endless(version):
            self.reconfigure(replace(self.config, num_epochs=sys.maxsize))
        return super().update(version, progress)


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
        fit = self.dynamics.fit

        def fit_for_ever(max_updates: int) -> EnsembleTraining:
            while is_endless(version):
                fit(10)
            return fit(max_updates)

        self.dynamics.fit = fit_for_ever  # type: ignore[method-assign]
        try:
            return super().update(version, progress)
        finally:
            self.dynamics.fit = fit  # type: ignore[method-assign]
