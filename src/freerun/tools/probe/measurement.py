"""What a probe has measured: plain data, which `probe_cache` keeps as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

DEFAULT_EPISODE_STEPS = 200
"""The length of the stand-in's episodes if no episode of the environment has ended."""
TOO_BUSY = 0.2
"""If other programs had the core for more than this share of the time, the measurement is not trusted."""

COMPUTES_ABOVE = 0.95
"""Environments that use more than this share of a core while they step never wait for anything."""


@dataclass(frozen=True)
class Environment:
    """What was measured of one environment."""

    construct_seconds: float
    reset_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    """A sample, in the order it came."""
    cpu_share: float
    """Processor time over time, while the environment steps and resets: 1 computes, 0 sleeps or waits."""
    loop_seconds: float
    """Seconds per step that a worker spends outside the environment: on inference and on recording the step."""
    episode_lengths: tuple[int, ...]
    time_limit: int | None
    megabytes: float
    """Memory that each worker adds."""
    vectors: dict[str, tuple[float, float]]
    """By the number of environments of a collector: its wall and processor seconds per step, with inference and
    resets."""
    threads_speed_up: float | None
    """Steps per second of two threads over those of one: 1 if steps hold Python's lock."""
    stolen_share: float = 0.0
    """The share of the trial in which other programs had the core."""
    megabytes_per_env: float = 0.0
    """Memory that each further environment adds to a worker."""
    bytes_per_step: int = 0
    """Shared memory that one step takes on its way to the learner."""
    cpu_seconds: float | None = None
    """Processor seconds per step of a worker with one environment; None if they were not measured."""

    @property
    def is_unsure(self) -> bool:
        """True if the machine was too busy to tell how fast the environment steps."""
        return self.stolen_share > TOO_BUSY

    @property
    def lengths(self) -> tuple[int, ...]:
        """Episode lengths; empty if no episode has ended and there is no time limit."""
        return self.episode_lengths or ((self.time_limit,) if self.time_limit else ())

    @property
    def mean_length(self) -> float | None:
        return float(np.mean(self.lengths)) if self.lengths else None

    @property
    def own_share(self) -> float:
        """The share of the measured times in which other programs did not have the core."""
        return 1.0 - self.stolen_share

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds of a step, with its share of the resets: step + reset / episode length.

        Time in which other programs had the core does not count."""
        resets = float(np.mean(self.reset_seconds)) if self.reset_seconds else 0.0
        seconds = float(np.mean(self.step_seconds)) + resets / (self.mean_length or DEFAULT_EPISODE_STEPS)
        return seconds * self.own_share


def vector_seconds(env: Environment, num_envs: int) -> tuple[float, float]:
    """Wall and processor seconds per step of a collector with this many environments, without handing over."""
    loop = env.loop_seconds * env.own_share
    known = {1: (env.seconds_per_step + loop, env.cpu_share * env.seconds_per_step + loop)}
    known |= {int(size): pair for size, pair in env.vectors.items()}
    if env.cpu_share > COMPUTES_ABOVE:
        # Where steps only compute, what they take beyond their processor time was taken by other programs. The kernel
        # does not see all of it, and one environment and several of them must be compared by the same measure.
        alone = min(known[1][0], env.cpu_seconds or math.inf)
        known = {1: (alone, alone)} | {size: (min(pair), pair[1]) for size, pair in known.items() if size > 1}
    sizes = sorted(known)
    # A step of all n environments takes a + b * n seconds, so the time per step, a / n + b, is linear in 1 / n.
    wall, cpu = (
        float(np.interp(-1 / num_envs, [-1 / size for size in sizes], [known[size][part] for size in sizes]))
        for part in (0, 1)
    )
    return wall, cpu


@dataclass(frozen=True)
class UpdateCost:
    """What one update of the algorithm takes, on the device of the run."""

    demand: dict[str, Any]
    steps: int
    seconds: float
    minibatch: int | None = None
    """Steps of a gradient step, if the algorithm has a setting for them."""
    update_steps: int | None = None
    """The setting of how many steps an update asks for; None if the algorithm was left to decide it."""
    learner: str = ""
    """All other settings of the algorithm, as text: costs with other settings cannot be compared."""

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True)
class Overhead:
    """Processor seconds per step that a mode takes for handing over: in a worker, and in the learner's process."""

    worker: float
    learner: float
    unit_steps: float = 1.0
    """The steps of the units that were handed over."""


@dataclass(frozen=True)
class Measurement:
    """All that a probe measures."""

    environment: Environment
    cores: int
    parallel_cores: float
    """The speed of all cores together, as a multiple of one core: less than their number if they share a cache."""
    inference_seconds: float
    batched_inference_seconds: float
    """Per environment, in a batch of 64."""
    updates: tuple[UpdateCost, ...]
    """For a few sizes of updates and minibatches; `update_cost` interpolates."""
    overheads: dict[str, tuple[Overhead, ...]]
    """By mode: for one or two sizes of units."""
    sync_seconds: dict[str, float]
    """By the number of environments: overhead of one vector step, in seconds, without the environments' own time."""
    available_megabytes: float
    took_seconds: float

    @property
    def is_unsure(self) -> bool:
        return self.environment.is_unsure

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Measurement:
        """The reverse of `to_json`; raises TypeError or KeyError if the content is something else."""
        env = dict(found["environment"])
        for name in ("reset_seconds", "step_seconds", "episode_lengths"):
            env[name] = tuple(env[name])
        env["vectors"] = {size: tuple(pair) for size, pair in env["vectors"].items()}
        return cls(
            **{
                **found,
                "environment": Environment(**env),
                "updates": tuple(UpdateCost(**update) for update in found["updates"]),
                "overheads": {
                    mode: tuple(Overhead(**cost) for cost in costs) for mode, costs in found["overheads"].items()
                },
            }
        )


@dataclass(frozen=True)
class TensorVector:
    """What was measured of environments that are tensors, stepped as one batch."""

    num_envs: int
    segment_steps: int
    """Steps of each environment in one segment."""
    seconds_per_step: float
    """Seconds of one step of one environment, with its share of the policy and of handing over."""


@dataclass(frozen=True)
class TensorMeasurement:
    """All that a probe measures where environments are tensors."""

    vectors: tuple[TensorVector, ...]
    updates: tuple[UpdateCost, ...]
    collect_share: float
    """The speed of collecting while the learner updates, as a share of its speed alone."""
    learn_share: float
    """The speed of an update while segments are collected, as a share of its speed alone."""
    mean_length: float | None
    """The mean length of the episodes that have ended; None if none has."""
    construct_seconds: float
    is_bounded: bool
    """True if no more environments were measured because a run would have too few updates."""
    took_seconds: float
    is_unsure: bool = False
    """Nobody can tell for a device whether others use it too."""

    def seconds_per_step(self, num_envs: int, segment_steps: int) -> float:
        """Return what a step takes, in segments of about this length if none of exactly this length was measured."""
        known = [vector for vector in self.vectors if vector.num_envs == num_envs]
        return min(known, key=lambda vector: abs(vector.segment_steps - segment_steps)).seconds_per_step

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TensorMeasurement:
        """The reverse of `to_json`; raises TypeError or KeyError if the content is something else."""
        vectors = tuple(TensorVector(**vector) for vector in found["vectors"])
        updates = tuple(UpdateCost(**update) for update in found["updates"])
        return cls(**{**found, "vectors": vectors, "updates": updates})


AnyMeasurement = Measurement | TensorMeasurement
