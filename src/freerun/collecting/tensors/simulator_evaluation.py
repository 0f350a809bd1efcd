"""--eval-every for simulators of which a process can have only one: episodes on the simulator that also trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from freerun.core import Policy, TensorEnv, UserError


@dataclass(eq=False)
class EvaluationRequest:
    """What the learner's thread asks of the simulator's."""

    policy: Policy
    num_episodes: int
    returns: list[float] | None = None
    """The answer: the returns of the first episode of as many environments."""


@runtime_checkable
class StartedSimulator(Protocol):
    """An environment that says whether `reset` begins new episodes. All but RSL-RL's do."""

    reset_begins_episodes: bool


def check_evaluation(env: TensorEnv, num_episodes: int) -> None:
    """Refuse evaluations that this simulator cannot make."""
    if isinstance(env, StartedSimulator) and not env.reset_begins_episodes:
        raise UserError(
            "--eval-every begins new episodes on the simulator that trains, and this one cannot be told to: leave it "
            "out, and use freerun eval afterwards"
        )
    if num_episodes > env.num_envs:
        raise UserError(
            f"--eval-episodes {num_episodes} is more than the {env.num_envs} environments, of which each plays one "
            "episode: lower it, or raise --num-envs"
        )
