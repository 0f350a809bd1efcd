"""What --adapt may move of an algorithm: how much is learned at a time, and from each step. Only where it was asked to.

Both change what is learned, not only how fast: that is why nothing of it moves without a declared bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freerun.algorithms.mbpo import MBPO
from freerun.algorithms.ppo import PPO
from freerun.algorithms.sac import OffPolicy
from freerun.core import Dial, UserError


def dials_of(algorithm: Any, most_minibatch: int | None, least_update_ratio: float | None) -> list[Dial]:
    if most_minibatch is None and least_update_ratio is None:
        return []
    is_ppo = isinstance(algorithm, PPO)
    if not is_ppo and not isinstance(algorithm, OffPolicy):
        raise UserError("--adapt can move nothing of this algorithm: leave --adapt-max-minibatch and the like out")
    minibatch, ratio = ("minibatch_size", "num_epochs") if is_ppo else ("batch_size", "updates_per_step")
    dials = []
    if most_minibatch is not None:
        if isinstance(algorithm, MBPO):  # its agent may be learning in another thread
            raise UserError("--adapt cannot move MBPO's minibatches while it runs: leave --adapt-max-minibatch out")
        dials.append(_dial(algorithm, "minibatch", minibatch, most=most_minibatch))
    if least_update_ratio is not None:
        dials.append(_dial(algorithm, "update_ratio", ratio, least=least_update_ratio))
    return dials


def _dial(algorithm: Any, name: str, setting: str, most: float | None = None, least: float | None = None) -> Dial:
    value = getattr(algorithm.config, setting)
    is_whole = isinstance(value, int)
    if (most or value) < value:
        raise UserError(f"--adapt-max-minibatch {most} is less than the {value} that the run starts with: raise it")
    if (least or value) > value:
        raise UserError(f"--adapt-min-update-ratio {least:g} is more than the {value:g} that the run starts with")

    def turn(wanted: float) -> None:
        number = int(wanted) if is_whole else wanted
        algorithm.config = replace(algorithm.config, **{setting: number})
        if isinstance(algorithm, OffPolicy):
            algorithm.reconfigured()

    read = lambda: float(getattr(algorithm.config, setting))  # noqa: E731
    return Dial(name, read, turn, least or value, most or value, is_whole, between_updates=True)
