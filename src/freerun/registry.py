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
from typing import Any, get_args, get_type_hints

import typeguard

from freerun.adapting.options import AdaptConfig
from freerun.config import CyberConfig, TrainConfig
from freerun.core import ModeOptions, UserError, callable_name, import_callable
from freerun.envs.tensors import is_only_tensors
from freerun.telemetry.tracking import TrackingConfig


@dataclass(frozen=True)
class Entry:
    """A name that users type: what it stands for, and one line about it."""

    target: str
    about: str
    config: str = "freerun.config:NoOptions"
    takes_turns: bool = False
    """Of a mode: it collects and learns in turns, so there is never any lag."""
    never_waits: bool = False
    """Of a mode: collectors go on whatever the learner does, so no limit to the lag can be kept."""
    whole_episodes: bool = True
    """Of a mode: it can hand over whole episodes, which is what --deterministic compares."""

    adapts: bool = False
    """Of a mode: some of it can be moved while it runs (--adapt)."""

    for_tensors: str | None = None
    """Of a mode: the same for environments that are tensors."""

    def load(self) -> Any:
        return _load(self.target)

    def load_for_tensors(self) -> Any:
        assert self.for_tensors is not None
        return _load(self.for_tensors)

    def load_config(self) -> Any:
        return _load(self.config)


ALGORITHMS = {
    "ppo": Entry(
        "freerun.algorithms.ppo:PPO",
        "proximal policy optimisation; tolerates lag by the decoupled objective",
        config="freerun.algorithms.ppo_config:PPOConfig",
    ),
    "sac": Entry(
        "freerun.algorithms.sac:SAC",
        "soft actor-critic; off-policy, for actions in a Box",
        config="freerun.algorithms.soft_agent:SACConfig",
    ),
    "mbpo": Entry(
        "freerun.algorithms.mbpo:MBPO",
        "model-based policy optimisation: SAC on short rollouts of a learned model; needs the fewest real steps",
        config="freerun.algorithms.mbpo:MBPOConfig",
    ),
}
MODES = {
    "sequential": Entry(
        "freerun.collectors.sequential:Sequential",
        "one environment in this process: the baseline, and the reference for correctness",
        takes_turns=True,
    ),
    "sync": Entry(
        "freerun.collectors.sync:Sync",
        "a process per environment, all stepped together: waits for the slowest at every step",
        config="freerun.collectors.sync:SyncConfig",
        takes_turns=True,
        for_tensors="freerun.collectors.tensors:TensorSync",
    ),
    "pipes": Entry(
        "freerun.collectors.pipes:Pipes",
        "persistent workers, a pipe each: whole episodes, handed over as each finishes",
        adapts=True,
    ),
    "executor": Entry(
        "freerun.collectors.executor:Executor",
        "a ProcessPoolExecutor kept warm: whole episodes, handed over as each finishes",
        adapts=True,
    ),
    "freerun": Entry(
        "freerun.collectors.freerun:Freerun",
        "persistent workers that write into shared memory and wait for nobody: the fastest on one machine",
        config="freerun.collectors.freerun:FreerunConfig",
        adapts=True,
    ),
    "ray": Entry(
        "freerun.collectors.ray:RayActors",
        "Ray actors on any number of machines: whole episodes or segments, run again where an actor or a node is lost",
        config="freerun.collectors.ray_config:RayConfig",
    ),
    "continuous": Entry(
        "freerun.collectors.continuous:Continuous",
        "collectors that never wait, and a queue that drops the oldest: real time (alias v1)",
        config="freerun.collectors.continuous:ContinuousConfig",
        never_waits=True,
        whole_episodes=False,
        adapts=True,
        for_tensors="freerun.collectors.tensors:TensorStream",
    ),
    "batch": Entry(
        "freerun.collectors.batch:Batch",
        "one collector gathers the next batch of steps while the learner works on the last; drops nothing (alias v2)",
        config="freerun.collectors.batch:BatchConfig",
        whole_episodes=False,
        adapts=True,
        for_tensors="freerun.collectors.tensors:TensorBatch",
    ),
}
TRACKERS = {
    "tensorboard": Entry("freerun.telemetry.tensorboard:TensorBoard", "event files in the run folder"),
    "wandb": Entry("freerun.telemetry.wandb:WeightsAndBiases", "Weights & Biases, online or offline"),
    "prometheus": Entry(
        "freerun.telemetry.prometheus:Prometheus", "an endpoint /metrics, for those who watch a cluster"
    ),
}
MODE_FOR_TENSORS = "batch"
"""The default for environments that the usual one cannot step."""
ALIASES = {"v1": "continuous", "v2": "batch"}
"""Other names of modes; config.json records the real one."""
PARTS = ("algorithm", "collector", "cyber", "tracking", "adapting")
"""Settings of the algorithm, of the mode, of some environments, of trackers and of --adapt; users see one flat list of
names."""
PATHS = ("run_dir", "cyborg_path", "workflows")
# What workers need; none of it may import torch (a test looks).
WORKER_MODULES = (
    "freerun.collectors.freerun",
    "freerun.collectors.pipes",
    "freerun.envs.gymnasium",
    "freerun.algorithms.actor",
)


OWN = {
    "algorithm": ("Config", "demand", "observe", "update", "state_dict", "load_state_dict"),
    "mode": ("publish", "collect", "counts", "close"),
}
"""What a user's own class must have, beside its constructor."""


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def lookup(kind: str, name: str, registry: Mapping[str, Entry]) -> Entry:
    """By its name in the registry; an algorithm or a mode of the user's own as module:Class."""
    if ":" in name and kind in OWN:
        return _own(kind, name)
    if name not in registry:
        raise UserError(f"there is no {kind} {name!r}: {_choices(name, registry)}")
    return registry[name]


def _own(kind: str, name: str) -> Entry:
    """What an entry says of ours, the class says of itself: its attributes have the entry's names."""
    target = import_callable(name, kind)
    missing = [part for part in OWN[kind] if not hasattr(target, part)]
    if missing:
        raise UserError(f"{kind} {name!r} has no {', no '.join(missing)}: docs/own_{kind}.md says what it needs")
    config: Any = getattr(target, "Config", None)
    has_fields = config is None or dataclasses.is_dataclass(config)
    if not has_fields:
        raise UserError(f"the Config of {kind} {name!r} is no dataclass: its fields become the {kind}'s flags")
    if kind == "mode" and config is not None and not issubclass(config, ModeOptions):
        raise UserError(f"the Config of mode {name!r} must inherit freerun.core.ModeOptions")
    return Entry(
        name,
        (target.__doc__ or "").partition("\n")[0],
        Entry.config if config is None else f"{name}.Config",
        takes_turns=getattr(target, "takes_turns", Entry.takes_turns),
        never_waits=getattr(target, "never_waits", Entry.never_waits),
        whole_episodes=getattr(target, "whole_episodes", Entry.whole_episodes),
    )


def name_own(kind: str, thing: Any) -> str:
    """The name of a class that was given as an object: it must be found by it again, as config.json has no more."""
    if isinstance(thing, str):
        return thing
    name = callable_name(thing)
    if "<locals>" in name or import_callable(name, kind) is not thing:
        raise UserError(f"{kind} {name!r} cannot be found by its name: define the class at the top level of a module")
    return name


def _choices(name: str, names: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"


# ---------------------------------------------------------------------------------------------- configuration


def config_class(options: Mapping[str, Any]) -> Any:
    """The settings of a run with this algorithm and this mode."""
    algorithm = lookup("algorithm", str(options.get("algo", TrainConfig.algo)), ALGORITHMS)
    mode = lookup("mode", mode_name(options), MODES)
    return TrainConfig[algorithm.load_config(), mode.load_config()]  # type: ignore[misc]


def mode_name(options: Mapping[str, Any]) -> str:
    default = MODE_FOR_TENSORS if is_only_tensors(options.get("env")) else TrainConfig.mode
    name = str(options.get("mode", default))
    return ALIASES.get(name, name)


def make_config(options: Mapping[str, Any]) -> TrainConfig[Any, Any]:
    """A config from flat names: those of config.json, of `freerun.train()` and of the flags."""
    parts = dict(zip(PARTS, (*get_args(config_class(options)), CyberConfig, TrackingConfig, AdaptConfig), strict=True))
    names = {part: {field.name for field in dataclasses.fields(kind)} for part, kind in parts.items()}
    names["run"] = {field.name for field in dataclasses.fields(TrainConfig)} - set(PARTS)
    for name in options:
        if not any(name in known for known in names.values()):
            check_name(name, options)
            raise UserError(f"unknown setting {name!r}: {_choices(name, sorted(set().union(*names.values())))}")
    if "env" not in options:
        raise UserError("no environment: name a Gymnasium id such as CartPole-v1, or your own as module:callable")
    options = {**options, "mode": mode_name(options)}
    # JSON has no tuples, and no setting is a list.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    options.update({name: Path(options[name]) for name in PATHS if isinstance(options.get(name), str)})
    kinds = [get_type_hints(kind) for kind in (TrainConfig, *parts.values())]
    _check_kinds(options, {name: kind for hints in kinds for name, kind in hints.items()})
    chosen = {part: {name: options[name] for name in options if name in known} for part, known in names.items()}
    return TrainConfig(**chosen.pop("run"), **{part: parts[part](**chosen[part]) for part in PARTS})


def check_name(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a setting that is not one of this run's, but of another algorithm or mode."""
    algorithm, mode = get_args(config_class(options))
    if any(
        name in get_type_hints(part)
        for part in (TrainConfig, CyberConfig, TrackingConfig, AdaptConfig, algorithm, mode)
    ):
        return
    own = ", ".join(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(mode))
    advice = f"; --mode {mode_name(options)} has {own or 'no settings of its own'}"
    for what, registry, more in (("--algo", ALGORITHMS, ""), ("--mode", MODES, advice)):
        owners = [key for key, entry in registry.items() if name in get_type_hints(entry.load_config())]
        if owners:
            raise UserError(f"unknown setting {name!r}: it belongs to {what} {' or '.join(owners)}{more}")


def _check_kinds(options: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """What comes from a file or from Python has not been through the flags' parser."""
    for name, value in options.items():
        try:
            if not (name in ("env", "network") and callable(value)):
                typeguard.check_type(value, kinds[name])
        except typeguard.TypeCheckError:
            raise UserError(f"{name} = {value!r} is of the wrong kind: it takes {_words(kinds[name])}") from None
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{name} = {value!r} is no number")


def _words(kind: Any) -> str:
    return kind.__name__ if kind.__class__ is type else str(kind).replace("typing.", "")


def flatten_config(config: TrainConfig[Any, Any]) -> dict[str, Any]:
    """The reverse of `make_config`, ready for JSON."""
    flat = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for part in PARTS:
        flat.update(dataclasses.asdict(flat.pop(part)))
    flat.update({name: callable_name(flat[name]) for name in ("env", "network") if callable(flat.get(name))})
    flat.update({name: str(flat[name]) for name in PATHS if flat[name] is not None})
    return flat
