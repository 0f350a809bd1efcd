"""Every name that a user may type, what it stands for, and how names and values become the settings of a run."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import typeguard

from freerun.adapters.tensor_envs import find_builder
from freerun.core import (
    SCRIPT,
    AlgorithmTraits,
    ModeOptions,
    ModeTraits,
    TrackerTraits,
    UserError,
    callable_name,
    import_callable,
)
from freerun.settings import env_flags, own_classes
from freerun.settings.config import AdaptConfig, AnyConfig, TrainConfig
from freerun.settings.foreign_names import name_here
from freerun.telemetry.advice import Situation
from freerun.telemetry.tracking import TrackingConfig


@dataclass(frozen=True)
class ModeEntry:
    """A mode that users name: its class declares everything else. Mode classes import neither torch nor Ray."""

    target: str
    """The class, as module:Class."""

    def load(self) -> Any:
        return _load(self.target)

    @property
    def traits(self) -> ModeTraits:
        return own_classes.mode_traits(self.load())

    @property
    def description(self) -> str:
        return self.traits.description or _first_line(self.load())

    def load_config(self) -> type[ModeOptions]:
        return self.traits.options

    def load_for_tensors(self) -> Any:
        variant = self.traits.tensors
        assert variant is not None
        return _load(variant.target)


@dataclass(frozen=True)
class AlgorithmEntry:
    """An algorithm that users name. Its class needs torch, so what `freerun list` and --help show stands apart."""

    target: str
    """The class, as module:Class."""
    config: str
    """The dataclass of its settings, as module:Class."""
    description: str
    """One line for `freerun list`."""

    def load(self) -> Any:
        return _load(self.target)

    @property
    def traits(self) -> AlgorithmTraits:
        return own_classes.algorithm_traits(self.load(), self.load_config())

    def load_config(self) -> Any:
        return _load(self.config)


@dataclass(frozen=True)
class TrackerEntry:
    """A tracker that users name: its class declares everything else, and imports its package when it is made."""

    target: str
    """The class, as module:Class."""

    def load(self) -> Any:
        return _load(self.target)

    @property
    def traits(self) -> TrackerTraits:
        return own_classes.tracker_traits(self.load())

    @property
    def description(self) -> str:
        return self.traits.description or _first_line(self.load())


ALGORITHMS = {
    "ppo": AlgorithmEntry(
        "freerun.algorithms.ppo.ppo:PPO",
        "freerun.algorithms.ppo.ppo_config:PPOConfig",
        "proximal policy optimisation; tolerates lag by the decoupled objective",
    ),
    "sac": AlgorithmEntry(
        "freerun.algorithms.sac.sac:SAC",
        "freerun.algorithms.sac.sac_config:SACConfig",
        "soft actor-critic; off-policy, for actions in a Box",
    ),
    "fastsac": AlgorithmEntry(
        "freerun.algorithms.fastsac.fastsac:FastSAC",
        "freerun.algorithms.fastsac.fastsac_config:FastSACConfig",
        "soft actor-critic (or TD3) for thousands of environments: few gradient steps on large batches",
    ),
    "dqn": AlgorithmEntry(
        "freerun.algorithms.dqn.dqn:DQN",
        "freerun.algorithms.dqn.dqn_config:DQNConfig",
        "deep Q-learning (double, duelling, n-step, prioritised); off-policy, for Discrete actions",
    ),
    "mbpo": AlgorithmEntry(
        "freerun.algorithms.mbpo.mbpo:MBPO",
        "freerun.algorithms.mbpo.mbpo_config:MBPOConfig",
        "model-based policy optimisation: SAC on short rollouts of a learned model; needs the fewest real steps",
    ),
}
MODES = {
    "sequential": ModeEntry("freerun.collecting.modes.sequential:Sequential"),
    "sync": ModeEntry("freerun.collecting.modes.sync:Sync"),
    "pipes": ModeEntry("freerun.collecting.modes.pipes:Pipes"),
    "executor": ModeEntry("freerun.collecting.modes.executor:Executor"),
    "freerun": ModeEntry("freerun.collecting.modes.freerun:Freerun"),
    "ray": ModeEntry("freerun.collecting.modes.ray_mode:RayActors"),
    "continuous": ModeEntry("freerun.collecting.modes.continuous:Continuous"),
    "batch": ModeEntry("freerun.collecting.modes.batch:Batch"),
}
TRACKERS = {
    "tensorboard": TrackerEntry("freerun.telemetry.tensorboard:TensorBoard"),
    "wandb": TrackerEntry("freerun.telemetry.wandb:WeightsAndBiases"),
    "prometheus": TrackerEntry("freerun.telemetry.prometheus:Prometheus"),
}
DEFAULT_TENSOR_MODE = "batch"
"""The default mode for environments that can be stepped as tensors: the usual default would step them one by one, or
not at all."""
PARTS = ("algorithm", "collector", "env_settings", "tracking", "adapting")
"""Settings of the algorithm, of the mode, of the environment, of trackers and of --adapt. Users see one flat list of
names."""
# What workers need; none of it may import torch (a test looks).
WORKER_MODULES = (
    "freerun.collecting.modes.freerun",
    "freerun.collecting.modes.pipes",
    "freerun.adapters.gymnasium_envs",
    "freerun.algorithms.policies.cnn_actor",  # and with it mlp_actor
    "freerun.algorithms.policies.memory_actor",
)


AnyEntry = TypeVar("AnyEntry", ModeEntry, AlgorithmEntry, TrackerEntry)


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    # A dotted name leads into a class: the settings of a user's own algorithm are module:Class.Config.
    return operator.attrgetter(name)(importlib.import_module(module))


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").partition("\n")[0]


# ---------------------------------------------------------------------------------------------- by name


def find_mode(name: str) -> ModeEntry:
    """Find a mode by its name in the registry, or a class of the user's own as module:Class."""
    if ":" not in name:
        return _choose("mode", name, MODES)
    own_classes.check_mode(name)
    return ModeEntry(name)


def find_algorithm(name: str) -> AlgorithmEntry:
    """Find an algorithm by its name in the registry, or a class of the user's own as module:Class."""
    if ":" not in name:
        return _choose("algorithm", name, ALGORITHMS)
    own = own_classes.check_algorithm(name)
    return AlgorithmEntry(name, f"{name}.Config", _first_line(own))


def find_tracker(name: str) -> TrackerEntry:
    """Find a tracker by its name in the registry, or a class of the user's own as module:Class."""
    if ":" not in name:
        return _choose("tracker", name, TRACKERS)
    own_classes.check_parts("tracker", name)
    return TrackerEntry(name)


def _choose(kind: str, name: str, registry: Mapping[str, AnyEntry]) -> AnyEntry:
    if name not in registry:
        raise UserError(f"there is no {kind} {name!r}: {_choices(name, registry)}")
    return registry[name]


def reference_mode() -> str:
    """Return the mode that others are compared with."""
    return next(name for name, entry in MODES.items() if entry.traits.is_reference)


def situation(settings: Mapping[str, Any], has_idle_gpu: bool = False) -> Situation:
    """Return what advice on a run depends on, from its settings by flat names. A user's own mode is not imported."""
    entry = MODES.get(str(settings.get("mode")))
    traits = ModeTraits() if entry is None else entry.traits
    steps_tensors = traits.tensors is not None and find_builder(settings.get("env")) is not None
    flag = "--num-envs" if steps_tensors else traits.workers_flag
    more = f"more {flag}" if flag is not None else f"--mode {TrainConfig.mode}, which has several workers"
    num_workers = settings.get("num_workers")
    algorithm = ALGORITHMS.get(str(settings.get("algo")))
    work_setting = None if algorithm is None else algorithm.traits.update_ratio_setting
    work = None if work_setting is None else settings.get(work_setting)
    work_flag = f"--{work_setting.replace('_', '-')}" if work_setting and isinstance(work, (int, float)) else None
    count = num_workers if isinstance(num_workers, int) else None
    larger_is_faster = algorithm is None or algorithm.traits.larger_minibatch_is_faster
    return Situation(count, more, has_idle_gpu, work_flag, float(work or 0.0), larger_is_faster)


def _choices(name: str, names: Mapping[str, object] | Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"


# ---------------------------------------------------------------------------------------------- configuration


def config_class(options: Mapping[str, Any]) -> Any:
    """Return the class of the settings of a run with this algorithm and this mode."""
    algorithm = find_algorithm(str(options.get("algo", TrainConfig.algo)))
    mode = find_mode(mode_name(options))
    return TrainConfig[algorithm.load_config(), mode.load_config()]  # type: ignore[misc]


def part_classes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dataclass behind each part of the settings of a run, by the names in `PARTS`."""
    algorithm, mode = get_args(config_class(options))
    return {
        "algorithm": algorithm,
        "collector": mode,
        "env_settings": env_flags.settings_class(options.get("env")),
        "tracking": TrackingConfig,
        "adapting": AdaptConfig,
    }


def mode_name(options: Mapping[str, Any]) -> str:
    """Return the mode that was named, or the one that suits the environment where none was."""
    default = DEFAULT_TENSOR_MODE if find_builder(options.get("env")) is not None else TrainConfig.mode
    return real_name(str(options.get("mode", default)))


def real_name(mode: str) -> str:
    """Return the name of a mode that may have been given by an alias."""
    if mode in MODES or ":" in mode:
        return mode
    return next((name for name, entry in MODES.items() if mode in entry.traits.aliases), mode)


def make_config(options: Mapping[str, Any]) -> AnyConfig:
    """Make a config from flat names: those of config.json, of `freerun.train()` and of the flags."""
    parts = part_classes(options)
    names = {part: _field_names(kind) for part, kind in parts.items()}
    names["run"] = _field_names(TrainConfig) - set(PARTS)
    known = set[str]().union(*names.values())
    options = env_flags.without_unset(options, known)
    for name in options:
        if name not in known:
            check_name(name, options)
            raise UserError(f"unknown setting {name!r}: {_choices(name, sorted(known))}")
    if "env" not in options:
        raise UserError("no environment: name a Gymnasium id such as CartPole-v1, or your own as module:callable")
    options = {**options, "mode": mode_name(options)}
    # JSON has no tuples, and no setting is a list.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    # What this script has defined is known by name in this process alone: workers are sent the thing itself.
    for name, what in (("env", "environment"), ("network", "network")):
        if isinstance(options.get(name), str) and options[name].startswith(f"{SCRIPT}:"):
            options[name] = import_callable(options[name], what)
    kinds = setting_kinds(options)
    # Nor has JSON paths.
    options.update({name: Path(value) for name, value in options.items() if _is_path(kinds[name], value)})
    check_kinds(options, kinds)
    for tracker in options.get("track", ()):
        find_tracker(tracker)
    chosen = {part: {name: options[name] for name in options if name in own} for part, own in names.items()}
    return TrainConfig(**chosen.pop("run"), **{part: parts[part](**chosen[part]) for part in PARTS})


def setting_kinds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of each setting of a run with this algorithm, mode and environment."""
    parts = (TrainConfig, *part_classes(options).values())
    return {name: kind for part in parts for name, kind in get_type_hints(part).items() if name not in PARTS}


def changed_config(config: AnyConfig, changes: Mapping[str, Any]) -> AnyConfig:
    """Return the settings with other values, by flat names that they have."""
    changed: dict[str, Any] = {}
    for part in PARTS:
        own = {name: changes[name] for name in changes.keys() & _field_names(getattr(config, part))}
        changed[part] = dataclasses.replace(getattr(config, part), **own)
    run = {name: changes[name] for name in changes.keys() & _field_names(TrainConfig)}
    return dataclasses.replace(config, **changed, **run)


def check_name(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a setting that is not one of this run's, but of another algorithm or mode."""
    parts = part_classes(options)
    known = {setting for part in (TrainConfig, *parts.values()) for setting in _field_names(part)} - set(PARTS)
    if name in known:
        return
    here = name_here(name) or name
    called = "" if here == name else f"it is called {here} here (--{here.replace('_', '-')})"
    if here in known:
        raise UserError(f"unknown setting {name!r}: {called}")
    own = ", ".join(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(parts["collector"]))
    advice = f"; --mode {mode_name(options)} has {own or 'no settings of its own'}"
    kinds: list[tuple[str, Mapping[str, ModeEntry | AlgorithmEntry], str]] = [
        ("--algo", ALGORITHMS, ""),
        ("--mode", MODES, advice),
    ]
    for what, registry, more in kinds:
        owners = [key for key, entry in registry.items() if here in get_type_hints(entry.load_config())]
        if owners:
            subject = f"{called} and" if called else "it"
            raise UserError(f"unknown setting {name!r}: {subject} belongs to {what} {' or '.join(owners)}{more}")
    env_flags.refuse(name, options.get("env"))


def check_kinds(options: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """What comes from a file or from Python has not been through the flags' parser."""
    for name, value in options.items():
        try:
            if not (name in ("env", "network") and callable(value)):
                typeguard.check_type(value, kinds[name])
        except typeguard.TypeCheckError:
            raise UserError(f"{name} = {value!r} is of the wrong kind: it takes {_words(kinds[name])}") from None
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{name} = {value!r} is no number")


def _field_names(part: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(part)}


def _is_path(kind: Any, value: object) -> bool:
    """True if a string stands for a path: the setting takes paths, and no strings."""
    return isinstance(value, str) and Path in get_args(kind) and str not in get_args(kind)


def _words(kind: Any) -> str:
    return kind.__name__ if kind.__class__ is type else str(kind).replace("typing.", "")


def flatten_config(config: AnyConfig) -> dict[str, Any]:
    """Undo `make_config`: return flat names and values, ready for JSON."""
    flat = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for part in PARTS:
        flat.update(dataclasses.asdict(flat.pop(part)))
    flat.update({name: callable_name(flat[name]) for name in ("env", "network") if callable(flat.get(name))})
    return {name: str(value) if isinstance(value, Path) else value for name, value in flat.items()}
