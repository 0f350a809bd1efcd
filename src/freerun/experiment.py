"""The composition root: the only module that knows every name."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import gymnasium
import typeguard
from rich.console import Console

from freerun.collectors.trials import Trials
from freerun.config import DEFAULT_TOTAL_STEPS, NoOptions, TrainConfig
from freerun.core import (
    Algorithm,
    Collector,
    CollectorSettings,
    Counts,
    Gauge,
    MetricSink,
    Policy,
    UserError,
    callable_name,
)
from freerun.envs.gymnasium import EnvName, GymnasiumFactory
from freerun.persistence.run_folder import RunFolder
from freerun.presets import settings_of
from freerun.telemetry.budget import Budget
from freerun.telemetry.jsonl import JsonLines
from freerun.telemetry.ledger import Ledger
from freerun.telemetry.machine import Machine
from freerun.telemetry.terminal import LiveDisplay, LogLines
from freerun.training import train
from freerun.transport import processes


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

    def load(self) -> Any:
        return _load(self.target)

    def load_config(self) -> Any:
        return _load(self.config)


ALGORITHMS = {
    "ppo": Entry(
        "freerun.algorithms.ppo:PPO",
        "proximal policy optimisation; tolerates lag by the decoupled objective",
        config="freerun.algorithms.ppo:PPOConfig",
    ),
    "sac": Entry(
        "freerun.algorithms.sac:SAC",
        "soft actor-critic; off-policy, for actions in a Box",
        config="freerun.algorithms.sac:SACConfig",
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
        takes_turns=True,
    ),
    "pipes": Entry(
        "freerun.collectors.pipes:Pipes",
        "persistent workers, a pipe each: whole episodes, handed over as each finishes",
    ),
    "executor": Entry(
        "freerun.collectors.executor:Executor",
        "a ProcessPoolExecutor kept warm: whole episodes, handed over as each finishes",
    ),
    "freerun": Entry(
        "freerun.collectors.freerun:Freerun",
        "persistent workers that write into shared memory and wait for nobody: the fastest on one machine",
        config="freerun.collectors.freerun:FreerunConfig",
    ),
    "continuous": Entry(
        "freerun.collectors.continuous:Continuous",
        "collectors that never wait, and a queue that drops the oldest: real time (alias v1)",
        config="freerun.collectors.continuous:ContinuousConfig",
        never_waits=True,
        whole_episodes=False,
    ),
    "batch": Entry(
        "freerun.collectors.batch:Batch",
        "one collector gathers the next batch of steps while the learner works on the last; drops nothing (alias v2)",
        config="freerun.collectors.batch:BatchConfig",
        whole_episodes=False,
    ),
}
ALIASES = {"v1": "continuous", "v2": "batch"}
"""Other names of modes; config.json records the real one."""
PARTS = ("algorithm", "collector")
"""Settings of the algorithm and of the mode; users see one flat list of names."""
# What workers need; none of it may import torch (a test looks).
WORKER_MODULES = (
    "freerun.collectors.freerun",
    "freerun.collectors.pipes",
    "freerun.envs.gymnasium",
    "freerun.algorithms.actor",
)


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run_dir: Path
    summary: dict[str, Any]
    policy: Policy


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def lookup(kind: str, name: str, registry: Mapping[str, Entry]) -> Entry:
    if name not in registry:
        raise UserError(f"there is no {kind} {name!r}: {_choices(name, registry)}")
    return registry[name]


def _choices(name: str, names: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"


# ---------------------------------------------------------------------------------------------- configuration


def config_class(options: Mapping[str, Any]) -> Any:
    """The settings of a run with this algorithm and this mode."""
    algorithm = lookup("algorithm", str(options.get("algo", TrainConfig.algo)), ALGORITHMS)
    mode = lookup("mode", _mode_name(options), MODES)
    return TrainConfig[algorithm.load_config(), mode.load_config()]  # type: ignore[misc]


def _mode_name(options: Mapping[str, Any]) -> str:
    name = str(options.get("mode", TrainConfig.mode))
    return ALIASES.get(name, name)


def make_config(options: Mapping[str, Any]) -> TrainConfig[Any, Any]:
    """A config from flat names: those of config.json, of `freerun.train()` and of the flags."""
    parts = dict(zip(PARTS, get_args(config_class(options)), strict=True))
    names = {part: {field.name for field in dataclasses.fields(kind)} for part, kind in parts.items()}
    names["run"] = {field.name for field in dataclasses.fields(TrainConfig)} - set(PARTS)
    for name in options:
        if not any(name in known for known in names.values()):
            check_name(name, options)
            raise UserError(f"unknown setting {name!r}: {_choices(name, sorted(set().union(*names.values())))}")
    if "env" not in options:
        raise UserError("no environment: name a Gymnasium id such as CartPole-v1, or your own as module:callable")
    options = {**options, "mode": _mode_name(options)}
    # JSON has no tuples, and no setting is a list.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    if isinstance(options.get("run_dir"), str):
        options["run_dir"] = Path(options["run_dir"])
    kinds = [get_type_hints(kind) for kind in (TrainConfig, *parts.values())]
    _check_kinds(options, {name: kind for hints in kinds for name, kind in hints.items()})
    chosen = {part: {name: options[name] for name in options if name in known} for part, known in names.items()}
    return TrainConfig(**chosen.pop("run"), **{part: parts[part](**chosen[part]) for part in PARTS})


def check_name(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a setting that is not one of this run's, but of another algorithm or mode."""
    algorithm, mode = get_args(config_class(options))
    if any(name in get_type_hints(part) for part in (TrainConfig, algorithm, mode)):
        return
    own = ", ".join(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(mode))
    advice = f"; --mode {_mode_name(options)} has {own or 'no settings of its own'}"
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
        except typeguard.TypeCheckError as error:
            raise UserError(f"{name} = {value!r} is of the wrong kind: {' '.join(str(error).split())}") from None


def flatten_config(config: TrainConfig[Any, Any]) -> dict[str, Any]:
    """The reverse of `make_config`, ready for JSON."""
    flat = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for part in PARTS:
        flat.update(dataclasses.asdict(flat.pop(part)))
    flat.update({name: callable_name(flat[name]) for name in ("env", "network") if callable(flat.get(name))})
    flat["run_dir"] = None if flat["run_dir"] is None else str(flat["run_dir"])
    return flat


# ---------------------------------------------------------------------------------------------- running


def run(config: TrainConfig[Any, Any]) -> Result:
    """Train as configured; keep what was learned also when the run is interrupted or fails."""
    config = _complete(config)
    mode = lookup("mode", config.mode, MODES)
    flat_config = flatten_config(config)
    folder = RunFolder.choose(config.run_dir, flat_config["env"], config.mode)
    factory = GymnasiumFactory(config.env, config.env_args, config.max_episode_steps)
    algorithm = _make_algorithm(config, factory)
    config.collector.check(algorithm.demand())
    prefers_td_error = getattr(config.collector, "queue_priority", None) == "td-error"
    if prefers_td_error and not hasattr(algorithm, "importance"):
        raise UserError(
            "--queue-priority td-error needs an algorithm with a critic that learns off-policy: --algo sac or mbpo"
        )
    settings = CollectorSettings(config.num_workers or 1, config.max_lag, config.seed, config.deterministic)
    processes.preload([*WORKER_MODULES, *_entry_point_module(config.env)])
    budget = Budget(config.total_steps, config.total_episodes)
    outcome = "failed"
    with contextlib.ExitStack() as stack:
        started = time.perf_counter()
        options = [] if isinstance(config.collector, NoOptions) else [config.collector]
        collector: Collector = mode.load()(factory, algorithm.policy, settings, *options)
        stack.callback(collector.close)
        if prefers_td_error:
            collector.prefer(algorithm.importance)  # type: ignore[attr-defined]
        startup_seconds = time.perf_counter() - started
        folder.create({**flat_config, "run_dir": None})
        ledger = Ledger(stack.enter_context(folder.ledger_path.open("w", buffering=1, encoding="utf-8")))
        sinks: list[MetricSink] = [JsonLines(folder.metrics_path)]
        if not config.quiet:
            sinks.append(_display(config, flat_config["env"], budget, collector))
        gauges = _gauges(config, factory, algorithm.policy)
        for close in [part.close for part in sinks] + [part.close for part in gauges]:
            stack.callback(close)
        started = time.perf_counter()
        try:
            train(algorithm, collector, budget, ledger, sinks, gauges)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
        finally:
            wall_seconds = time.perf_counter() - started
            summary = {
                "outcome": outcome,
                **{name: flat_config[name] for name in ("mode", "algo", "env", "seed", "num_workers")},
                "startup_seconds": startup_seconds,
                **_figures(ledger, collector.counts(), wall_seconds),
            }
            folder.write_policy(algorithm.policy.arrays, algorithm.policy.describe())
            folder.write_summary(summary)
    return Result(folder.path, summary, algorithm.policy)


def _gauges(config: TrainConfig[Any, Any], factory: GymnasiumFactory, policy: Policy) -> list[Gauge]:
    on_gpu = config.device.startswith("cuda")
    gauges: list[Gauge] = [Machine(int(config.device.partition(":")[2] or 0) if on_gpu else None)]
    if config.eval_every is not None:
        gauges.append(Trials(factory.make(1), policy, config.seed, config.eval_every, config.eval_episodes))
    return gauges


def _figures(ledger: Ledger, counts: Counts, wall_seconds: float) -> dict[str, Any]:
    return {
        "env_steps": ledger.steps,
        "episodes": ledger.episodes,
        "updates": ledger.version,
        "wall_seconds": wall_seconds,
        "steps_per_second": ledger.steps / wall_seconds,
        "episodes_per_second": ledger.episodes / wall_seconds,
        "mean_return": ledger.mean_return if ledger.episodes else None,
        "lag_mean": ledger.lag_mean,
        "lag_max": ledger.lag_max,
        "dropped_steps": counts.steps_dropped,
        "dropped_steps_by_worker": {str(worker): steps for worker, steps in counts.steps_dropped_by_worker.items()},
        "dropped_steps_by_length": {str(length): steps for length, steps in counts.steps_dropped_by_length.items()},
        "drop_bias": counts.drop_bias,
        "segments_rejected": counts.segments_rejected,
        "worker_restarts": counts.worker_restarts,
        "ledger": ledger.summary(counts),
    }


def _complete(config: TrainConfig[Any, Any]) -> TrainConfig[Any, Any]:
    """Fill in what was left open, so that config.json says everything."""
    changes: dict[str, Any] = {}
    if config.total_steps is None and config.total_episodes is None:
        changes["total_steps"] = DEFAULT_TOTAL_STEPS
    if config.num_workers is None:
        one_per_core = 1 if config.mode == "sequential" else os.cpu_count() or 1
        changes["num_workers"] = config.collector.num_workers or one_per_core
    if config.device == "auto":
        import torch

        changes["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    mode = lookup("mode", config.mode, MODES)
    takes_turns = mode.takes_turns or config.deterministic
    if config.max_lag is None and not mode.never_waits:
        changes["max_lag"] = 0 if takes_turns else config.algorithm.default_max_lag
    changes["algorithm"] = _suited(config.algorithm, config.collector.unit_steps, takes_turns)
    return dataclasses.replace(config, **changes)


def _suited(algorithm: Any, unit_steps: int | None, takes_turns: bool) -> Any:
    """The algorithm's settings, with those that were left to the mode."""
    changes: dict[str, Any] = {}
    counts_episodes = getattr(algorithm, "episodes_per_update", None) is not None
    if unit_steps is not None and algorithm.steps_per_update is None and not counts_episodes:
        changes["steps_per_update"] = unit_steps
    if getattr(algorithm, "stages", None) == "auto":
        changes["stages"] = "in-turn" if takes_turns else "concurrent"
    return dataclasses.replace(algorithm, **changes)


def _make_algorithm(config: TrainConfig[Any, Any], factory: GymnasiumFactory) -> Algorithm:
    import torch  # here and not above: `freerun list` and the workers do without it

    device = config.device
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {str(error).splitlines()[0]}; try --device cpu") from None
    torch.set_num_threads(config.learner_threads)
    if device.startswith("cuda") and not config.deterministic:
        torch.set_float32_matmul_precision("high")  # TF32: small networks need no more digits
    torch.use_deterministic_algorithms(config.deterministic)
    algorithm = lookup("algorithm", config.algo, ALGORITHMS).load()
    made: Algorithm = algorithm(factory.spec, config.algorithm, config.seed, device, config.deterministic)
    return made


def _entry_point_module(env: EnvName) -> list[str]:
    """A registered environment's own module: loaded in the fork server, it costs workers neither time nor memory."""
    spec = gymnasium.registry.get(env) if isinstance(env, str) else None
    return [spec.entry_point.partition(":")[0]] if spec and isinstance(spec.entry_point, str) else []


def _display(config: TrainConfig[Any, Any], env: str, budget: Budget, collector: Collector) -> MetricSink:
    console = Console(stderr=True)
    title = f"freerun · {env} · {config.algo} · {config.mode} × {collector.num_workers} · seed {config.seed}"
    if console.is_terminal:
        return LiveDisplay(title, budget, collector.counts, console)
    return LogLines(title, Console(file=sys.stderr, width=240))


# ---------------------------------------------------------------------------------------------- the Python interface


def train_from_python(
    env: str | Callable[..., gymnasium.Env[Any, Any]], *, preset: str | Sequence[str] = (), **settings: Any
) -> Result:
    """Train an agent: `train("CartPole-v1", total_steps=50_000, mode="pipes")`. Settings are the flags' names."""
    names = [preset] if isinstance(preset, str) else preset
    return run(make_config({**settings_of(names), "env": env, **settings}))
