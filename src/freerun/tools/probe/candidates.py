"""The settings that `auto` chooses from: what a mode leaves open, and which values the machine has room for.

A candidate is a mode with values for the open settings. Its config is completed as that of a run would be, because the
sizes of updates may depend on the number of environments; and the prediction is for the completed config alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freerun.core import HandedOver, ModeTraits, Predictor, UserError
from freerun.settings.config import AnyConfig
from freerun.settings.defaults import MOST_WORKERS, WORKERS_PER_CORE, complete
from freerun.settings.factories import episodes_per_update, is_tensors
from freerun.settings.registry import find_algorithm, find_mode
from freerun.tools.probe.measurement import Environment, vector_seconds
from freerun.tools.probe.update_costs import steps_per_update

WAITS_BELOW = 0.5
"""An environment that uses less than this share of a core while it steps leaves the core to other workers."""
CROWDS = (10, 25, 50, 100)
"""Numbers of workers for environments that wait, besides multiples of the cores."""
MEMORY_SHARE = 0.5
"""The share of the memory that is free now which workers may fill."""
CONTINUOUS_COLLECTORS = (1, 2, 4, 8, 16)
"""Numbers of collectors of `continuous`, as far as they divide its number of environments."""
ENVS_PER_WORKER = (1, 2, 4, 8, 16, 32, 64)
TOGETHER_PAYS = 0.9
"""Several environments per worker are candidates if that takes at most this share of the time per step of one."""
SHORTEST_SEGMENT = 16
"""Shorter segments hold too few rewards: their advantages would rest on the value function alone."""
WHOLE_EPISODES = 0
"""The length of segments with which episodes are not cut."""
SEGMENTS_PER_UPDATE = (1, 4)
"""Segments of each environment in one update. Shorter ones let the learner begin sooner with the next update."""
SLOTS_PER_WORKER = 3
"""Segments of each worker for which there is shared memory."""
TENSOR_FACTORS = (4, 16, 64, 256)
"""Multiples of the usual number of environments, where they are tensors and their number is open."""
FEWEST_UPDATES = 32
"""`auto` does not enlarge updates so far that a run has fewer of them than this."""


@dataclass(frozen=True)
class MachineLimits:
    """What bounds the candidates: the environment, the cores and the memory."""

    environment: Environment
    cores: int
    available_megabytes: float
    update_steps: int
    """Steps that an update asks for where the completed settings leave it to the algorithm."""

    def have_room_for(self, num_workers: int, envs_per_worker: int = 1, segment_steps: int = 0) -> bool:
        """True if the memory holds these workers, their environments and their segments. One worker always fits."""
        env = self.environment
        segments = SLOTS_PER_WORKER * segment_steps * envs_per_worker * env.bytes_per_step / 1e6
        worker = env.megabytes + (envs_per_worker - 1) * env.megabytes_per_env + segments
        is_least = num_workers == envs_per_worker == 1
        return is_least or num_workers * worker <= MEMORY_SHARE * self.available_megabytes

    @property
    def worker_counts(self) -> list[int]:
        """Numbers of workers to predict for, as far as the memory holds them."""
        counts = {1, 2, self.cores, 2 * self.cores}
        if self.environment.cpu_share < WAITS_BELOW:
            doubled = (2**power * self.cores for power in range(2, 9))
            counts |= {*CROWDS, *(count for count in doubled if count <= WORKERS_PER_CORE * self.cores)}
        return sorted(count for count in counts if count <= MOST_WORKERS and self.have_room_for(count))

    @property
    def envs_per_worker(self) -> Sequence[int]:
        """Numbers of environments per worker to predict for: one, if several of them are not faster together."""
        alone, _ = vector_seconds(self.environment, 1)
        sizes = [int(size) for size in self.environment.vectors]
        pays = any(vector_seconds(self.environment, size)[0] < TOGETHER_PAYS * alone for size in sizes)
        return ENVS_PER_WORKER if pays else (1,)


@dataclass(frozen=True)
class Candidate:
    """A mode with values for the settings that were left open."""

    mode: str
    settings: dict[str, int]
    """The values, by the names of the settings."""
    config: AnyConfig
    """All settings, completed with these values."""

    @property
    def num_workers(self) -> int:
        return workers_of(self.config)

    @property
    def num_envs(self) -> int:
        """The number of environments that are stepped at the same time."""
        return self.num_workers * envs_per_worker_of(self.config)


@dataclass(frozen=True)
class Search:
    """What `auto` or `freerun probe` is to choose from."""

    configs: Mapping[str, AnyConfig]
    """By mode: the settings as they were given, not completed."""
    given: Collection[str] = ()
    """The names of the settings that the user has given. These are never changed."""
    workers_alone: bool = False
    """True if nothing but the number of workers is left to the probe."""
    counts: Sequence[int] = ()
    """The numbers of workers to predict for; those that suit the machine if it is empty."""

    def completed(self) -> dict[str, AnyConfig]:
        """By mode: the settings of a run for which nothing is chosen."""
        return {mode: complete(config) for mode, config in self.configs.items()}

    @property
    def is_tensors(self) -> bool:
        """True if the environments are tensors. `auto_mode` keeps modes that step them otherwise apart."""
        return any(map(is_tensors, self.configs.values()))

    def open_settings(self, mode: str) -> list[str]:
        """The settings of the mode that are open, by name. Its traits and the fields of its settings decide."""
        config, traits = self.configs[mode], find_mode(mode).traits
        fields = {field.name for field in dataclasses.fields(config.collector)}
        if is_tensors(config):
            names = [] if self.workers_alone else ["num_envs"]
        else:
            names = [] if (name := workers_setting(traits)) is None else [name]
            if not self.workers_alone and _plays_units(traits):
                names += ["envs_per_worker", "segment_steps"] if _may_cut(config, traits) else ["envs_per_worker"]
        known = [name for name in names if name in fields or name == "num_workers"]
        return [name for name in known if name not in self.given and not _is_set(config, name)]

    def tensor_candidates(self, num_envs: int) -> list[Candidate]:
        """The candidates of all modes with this many environments that are tensors."""
        found = []
        for mode, given in self.configs.items():
            settings = {"num_envs": num_envs} if "num_envs" in self.open_settings(mode) else {}
            config, usual = _completed(given, settings), complete(given)
            if config is None or config.collector.num_envs != num_envs:
                continue
            # Updates of modes that hand over units of a fixed size are as large as a unit.
            if _learns_alike(config, usual, update_steps=config.collector.unit_steps):
                found.append(Candidate(mode, settings, config))
        return found

    def tensor_sizes(self) -> list[int]:
        """Numbers of environments that are tensors: the one that is set, and larger ones where it is open."""
        usual = {config.collector.num_envs for config in self.completed().values()}
        is_open = any("num_envs" in self.open_settings(mode) for mode in self.configs)
        larger = [max(usual) * factor for factor in TENSOR_FACTORS] if is_open else []
        return [size for size in sorted({*usual, *larger}) if self.tensor_candidates(size)]

    def candidates(self, limits: MachineLimits) -> list[Candidate]:
        """All candidates of all modes. The first of a mode is the one for which nothing is chosen but workers."""
        return [found for mode in self.configs for found in self._of_mode(mode, limits)]

    def _of_mode(self, mode: str, limits: MachineLimits) -> list[Candidate]:
        usual = complete(self.configs[mode])
        chooses_segments = "segment_steps" in self.open_settings(mode)
        found: dict[str, Candidate] = {}
        for settings in self._settings(mode, limits):
            config = _completed(self.configs[mode], settings)
            if config is None or not _learns_alike(config, usual, limits.update_steps):
                continue
            # Defaults may cut an update that was given into shorter segments than would be chosen here.
            is_short = chooses_segments and 0 < (config.collector.segment_steps or 0) < SHORTEST_SEGMENT
            if not is_short or not found:
                # Two candidates may be completed to the same settings. A config cannot be hashed, but its text can.
                found.setdefault(str(config), Candidate(mode, settings, config))
        return list(found.values())

    def _settings(self, mode: str, limits: MachineLimits) -> Iterator[dict[str, int]]:
        """Values for the open settings, without regard to what other settings say.

        What the user asks for is never too much, so memory bounds only what is chosen beyond it."""
        config, open_settings = self.configs[mode], self.open_settings(mode)
        env_counts = limits.envs_per_worker if "envs_per_worker" in open_settings else (None,)
        is_first = True
        for num_workers in self._counts(mode, limits):
            for num_envs in env_counts:
                settings: dict[str, int] = {}
                if num_workers is not None:
                    settings[workers_setting(find_mode(mode).traits) or ""] = num_workers
                if num_envs is not None:
                    settings["envs_per_worker"] = num_envs
                workers = num_workers or config.num_workers or 1
                envs = num_envs or config.collector.envs_per_worker
                is_asked_for = is_first or (bool(self.counts) and num_envs in (None, 1))
                is_first = False
                if is_asked_for or limits.have_room_for(workers, envs):
                    yield settings
                if "segment_steps" not in open_settings:
                    continue
                for steps in _segment_lengths(_completed(config, settings), workers * envs, limits):
                    if limits.have_room_for(workers, envs, steps):
                        yield {**settings, "segment_steps": steps}

    def _counts(self, mode: str, limits: MachineLimits) -> Sequence[int | None]:
        """Numbers of workers; None where they are not open."""
        config, traits = self.configs[mode], find_mode(mode).traits
        if not {workers_setting(traits)} & {*self.open_settings(mode)}:
            return (None,)
        if workers_setting(traits) == "num_workers":
            return list(self.counts) or limits.worker_counts
        # A mode whose own setting counts its workers shares its environments out among them.
        return [count for count in CONTINUOUS_COLLECTORS if config.collector.num_envs % count == 0]


def workers_of(config: AnyConfig) -> int:
    """Return the number of workers of a completed config."""
    return int(config.collector.num_workers or config.num_workers or 1)


def envs_per_worker_of(config: AnyConfig) -> int:
    """Return the environments of each worker of a completed config: its own, or its share of --num-envs."""
    num_workers = workers_of(config)
    return max(1, int(config.collector.envs_at_once(num_workers)) // num_workers)


def unit_steps_of(config: AnyConfig, episode_steps: float) -> float:
    """Return the steps of a unit: of a segment, of what the mode hands over at a time, or of an episode."""
    collector = config.collector
    if collector.segment_steps:
        return float(collector.segment_steps * collector.envs_per_worker)
    return float(collector.unit_steps or episode_steps)


def workers_setting(traits: ModeTraits) -> str | None:
    """Return the setting that counts a mode's workers; None if there is always one."""
    return None if traits.workers_flag is None else traits.workers_flag.removeprefix("--").replace("-", "_")


def with_settings(config: AnyConfig, settings: Mapping[str, Any]) -> AnyConfig:
    """Return the config with these values, each in the part that has a setting of this name."""
    own = {field.name for field in dataclasses.fields(config.collector)}
    of_mode = {name: value for name, value in settings.items() if name in own}
    of_run = {name: value for name, value in settings.items() if name not in own}
    return dataclasses.replace(config, collector=dataclasses.replace(config.collector, **of_mode), **of_run)


def _completed(config: AnyConfig, settings: Mapping[str, Any]) -> AnyConfig | None:
    """Complete the config with these values; None if another setting, such as a bound of --adapt, rules them out."""
    try:
        return complete(with_settings(config, settings))
    except UserError:
        return None


def _plays_units(traits: ModeTraits) -> bool:
    return traits.probe is not None and traits.probe.predictor is Predictor.SCHEDULED_UNITS


def _may_cut(config: AnyConfig, traits: ModeTraits) -> bool:
    """True if episodes may be cut into segments: the mode can, the algorithm may, and no whole ones are promised."""
    algorithm = find_algorithm(config.algo).traits
    in_steps = algorithm.on_policy and algorithm.counts_steps and episodes_per_update(config) is None
    return traits.hands_over is HandedOver.EPISODES_OR_SEGMENTS and in_steps and not config.deterministic


def _is_set(config: AnyConfig, name: str) -> bool:
    """True if a setting that has no value by default has one."""
    if name == "num_workers":
        return config.num_workers is not None
    field = next(field for field in dataclasses.fields(config.collector) if field.name == name)
    return bool(getattr(config.collector, name) != field.default)


def _learns_alike(config: AnyConfig, usual: AnyConfig, update_steps: int) -> bool:
    """True if what is chosen may change what an update learns from as it does.

    `update_steps` is what an update asks for where the settings leave it to the algorithm."""
    if config.deterministic:
        # The promise holds for any number of workers, so the choice must not change the algorithm's settings.
        return bool(config.algorithm == usual.algorithm)
    steps, usual_steps = (steps_per_update(found) or update_steps for found in (config, usual))
    return config.total_steps is None or steps <= max(usual_steps, config.total_steps // FEWEST_UPDATES)


def _segment_lengths(config: AnyConfig | None, num_envs: int, limits: MachineLimits) -> list[int]:
    """Lengths that share an update out evenly among all environments, so that none of them has to be idle; and 0 for
    whole episodes, which the defaults may not choose."""
    if config is None:
        return []
    steps = steps_per_update(config) or limits.update_steps
    lengths = (math.ceil(steps / num_envs / parts) for parts in SEGMENTS_PER_UPDATE)
    return [WHOLE_EPISODES, *(length for length in lengths if length >= SHORTEST_SEGMENT)]
