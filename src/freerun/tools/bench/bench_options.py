"""The flags of `freerun bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from freerun.adapters.tensor_envs import find_builder, is_only_tensors
from freerun.core import UserError, require_positive
from freerun.settings.config import TrainConfig
from freerun.settings.flag_parsing import EnvArgs
from freerun.settings.named_code import code_in
from freerun.settings.registry import MODES, check_name, find_mode, make_config, real_name
from freerun.tools.bench.load_meter import num_cores

ALL = "all"
SEGMENTS = f"{TrainConfig.mode}:segment_steps=25"
"""Also measured where all modes are: the settings that the README advises for slow environments."""
DEFAULT_MINUTES = 4.75
"""The time for each number of workers. A default bench with one number ends within five minutes."""
MOST_WORKERS = 2000
MOST_ENVS = 1_000_000
CPU_ENVS, GPU_ENVS = 64, 4096
"""Environments that are tensors, if their number is not given."""


@dataclass(frozen=True)
class BenchOptions:
    """The settings of a bench. Its fields become flags."""

    env: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]]
    """A Gymnasium id (CartPole-v1, freerun/Straggler-v0, …), or your own as module:callable."""
    modes: str = ALL
    """Modes, separated by commas; with settings of their own as freerun:segment_steps=25:envs_per_worker=2. Your own
    mode as module:Class."""
    workers: str | None = None
    """Numbers of workers, separated by commas (if not given: one per core, and ten times as many)."""
    num_envs: str | None = None
    """Numbers of environments that are stepped as tensors, separated by commas: the modes that can do so are compared
    with the simulator alone. (If not given, where ENV is nothing but tensors: 64 on a CPU and 4,096 on a GPU.)"""
    device: str = "cpu"
    """Where the learner computes, and where environments are that are tensors."""
    seconds: float = 4.0
    """How long a run is measured, once it is warm."""
    repeats: int = 3
    """How often everything is measured; the modes take turns."""
    max_minutes: float | None = None
    """When to stop, whatever is left (4.75 for each number of workers if not given). What takes longest gets fewer
    repeats."""
    steps_per_update: int | None = None
    """What an update learns from, in every mode (if not given: about a quarter of --seconds, and an episode of every
    worker)."""
    num_epochs: int = 4
    """Passes over the data of an update."""
    env_args: EnvArgs = field(default_factory=dict)
    """Arguments for the environment, as names and values."""
    max_episode_steps: int | None = None
    """Truncate episodes here."""
    output: Path | None = None
    """Folder for report.html, report.md and report.json (a new one under runs/ if not given)."""

    def __post_init__(self) -> None:
        require_positive(self, "repeats", "steps_per_update", "num_epochs", "max_episode_steps")
        if not 0.1 <= self.seconds <= 3600:
            raise UserError(f"--seconds must lie between 0.1 and 3600, not {self.seconds:g}")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise UserError(f"--max-minutes must be more than 0, not {self.max_minutes:g}")
        self._check_tensors()
        # They raise where a mode or a number is wrong, which is better said now than after minutes of measuring.
        self.labels()
        self.numbers()

    @property
    def is_tensors(self) -> bool:
        """True if environments are stepped as tensors, and their numbers are compared."""
        return self.num_envs is not None or is_only_tensors(self.env)

    def _check_tensors(self) -> None:
        if self.num_envs is not None and find_builder(self.env) is None:
            raise UserError(f"{self.env} is not stepped as tensors: leave --num-envs out, and give --workers")
        if self.is_tensors and self.workers is not None:
            raise UserError("--workers is for processes: environments that are tensors are counted by --num-envs")
        if self.is_tensors and self.max_episode_steps is not None:
            raise UserError(
                "--max-episode-steps is not for environments that are tensors: they have a time limit of their own"
            )

    def numbers(self) -> list[int]:
        """The numbers of workers, or of environments that are tensors, to measure with, the lowest first."""
        if self.is_tensors:
            usual = GPU_ENVS if self.device.startswith("cuda") else CPU_ENVS
            return [usual] if self.num_envs is None else _read_numbers("--num-envs", self.num_envs, MOST_ENVS)
        if self.workers is None:
            return sorted({num_cores(), 10 * num_cores()})
        return _read_numbers("--workers", self.workers, MOST_WORKERS)

    def labels(self) -> list[str]:
        """The modes as they are named in the report."""
        labels = []
        for word in (part.strip() for part in self.modes.split(",")):
            labels += self._all_labels() if word == ALL else [real_name(word)]
        for label in labels:
            read_mode(label)
        return list(dict.fromkeys(labels))

    def _all_labels(self) -> list[str]:
        if self.is_tensors:
            return [name for name, mode in MODES.items() if mode.traits.tensors is not None]
        return [*MODES, SEGMENTS]

    def seconds_allowed(self) -> float:
        """Return when to stop, in seconds from the start."""
        minutes = DEFAULT_MINUTES * len(self.numbers()) if self.max_minutes is None else self.max_minutes
        return 60 * minutes


def _read_numbers(flag: str, given: str, most: int) -> list[int]:
    found = set()
    for word in given.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= most:
            raise UserError(f"{flag} are numbers from 1 to {most:,}, such as 1,10,100, not {given!r}")
        found.add(int(word))
    return sorted(found)


def _split_label(label: str) -> tuple[str, list[str]]:
    """Split a label into the mode and the words of its settings, without importing the mode."""
    mode, *words = label.strip().split(":")
    mode = real_name(mode)
    if mode not in MODES and words and "=" not in words[0]:  # the user's own, as module:Class
        mode = f"{mode}:{words.pop(0)}"
    return mode, words


def code_in_bench(options: Mapping[str, Any]) -> list[str]:
    """Return all code that the settings of a bench name. Nothing of it is imported to find out."""
    found = set(code_in(options))
    for label in str(options.get("modes", ALL)).split(","):
        mode, words = _split_label(label)
        # As text: a setting such as ray_address may name a machine, and need not be parsed for that.
        settings = {name.replace("-", "_"): value for name, _, value in (word.partition("=") for word in words)}
        found.update(code_in({**settings, "mode": mode}))
    return sorted(found)


def read_mode(label: str) -> tuple[str, dict[str, Any]]:
    """Return a mode and its settings: `freerun:segment_steps=25` is freerun in segments of 25 steps."""
    mode, words = _split_label(label)
    find_mode(mode)
    settings = {}
    for word in words:
        name, sign, value = word.partition("=")
        name = name.replace("-", "_")
        if not sign:
            raise UserError(f"--modes {label}: settings of a mode are written as {mode}:name=value, not {word!r}")
        check_name(name, {"mode": mode})
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value  # a word needs no quotes
    make_config({"env": "", "mode": mode, **settings})
    return mode, settings
