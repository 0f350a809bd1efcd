"""The composition root: puts the parts of a run together, and keeps what comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console

from freerun import learners
from freerun.collectors.joint import Joint, share_of_start
from freerun.collectors.trials import Trials
from freerun.config import DEFAULT_TOTAL_STEPS, NoOptions, TrainConfig
from freerun.core import (
    SERIES_BITS,
    Algorithm,
    Alone,
    Collector,
    CollectorSettings,
    Counts,
    Gauge,
    MetricSink,
    Peers,
    Policy,
    Renewable,
    SharedSeed,
    Start,
    TensorEnv,
    UserError,
)
from freerun.envs import CYBER_ENVS
from freerun.envs.gymnasium import EnvName, GymnasiumFactory
from freerun.envs.isaac_launch import is_isaac_task, resolve
from freerun.envs.tensors import TensorEnvs, find_builder, give, is_only_tensors
from freerun.envs.workflow import DEFAULT_COMPLIANCE_WEIGHT, SEPARATOR, WorkflowEnv
from freerun.persistence import origin
from freerun.persistence.checkpoint import Checkpoint, Checkpoints
from freerun.persistence.files import Lines
from freerun.persistence.incidents import IncidentFile
from freerun.persistence.keeper import Interval, Keeper
from freerun.persistence.run_folder import RunFolder, pack_policy
from freerun.persistence.secrecy import refuse_hidden, without_secrets
from freerun.persistence.state import check_fit as check_state
from freerun.presets import settings_of
from freerun.registry import ALGORITHMS, MODES, TRACKERS, WORKER_MODULES, flatten_config, lookup, make_config
from freerun.resuming import check_changes, newest
from freerun.resuming import settings_of as settings_of_run
from freerun.telemetry.background import Background
from freerun.telemetry.budget import Budget
from freerun.telemetry.classic import ClassicLines
from freerun.telemetry.figures import RecentRecords
from freerun.telemetry.finite_guard import FiniteGuard
from freerun.telemetry.joint_ledger import JointLedger
from freerun.telemetry.jsonl import JsonLines
from freerun.telemetry.ledger import Ledger
from freerun.telemetry.log_file import LogFile
from freerun.telemetry.machine import Machine
from freerun.telemetry.rsl_rl import RslRlBlocks
from freerun.telemetry.shares import Shares
from freerun.telemetry.terminal import LiveDisplay, LogLines
from freerun.telemetry.timeline import Recording, Timeline
from freerun.telemetry.trace import write_trace
from freerun.telemetry.tracking import TrackedRun
from freerun.telemetry.web_page import WebPage
from freerun.training import train
from freerun.transport import processes
from freerun.transport.signals import interruptible
from freerun.transport.tracks import Tracks

logger = logging.getLogger("freerun")


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run_dir: Path
    summary: dict[str, Any]
    policy: Policy
    is_kept: bool = True
    """Whether the disk took all of it."""
    page: str | None = None
    """Address of the web page that showed it, with --watch."""


# ---------------------------------------------------------------------------------------------- running


class Pool:
    """Environments and workers, for one training or for several that follow each other without a restart."""

    def __init__(self, factory: GymnasiumFactory | TensorEnvs):
        self.factory = factory
        self.tracks: Tracks | None = None
        self.incidents = IncidentFile()
        self._collector: Renewable | None = None

    def collector(
        self, config: TrainConfig[Any, Any], algorithm: Algorithm, start: Start, peers: Peers | None = None
    ) -> Collector:
        """The workers that are there, or new ones."""
        peers = peers or Alone()
        if self._collector is None:
            self._collector = self._start(config, algorithm, start, peers)
        else:
            self._collector.renew(start)
        if peers.count == 1:
            return self._collector
        mode = lookup("mode", config.mode, MODES)
        whole = mode.whole_episodes and getattr(config.collector, "segment_steps", None) is None
        return Joint(self._collector, peers, start, whole, mode.takes_turns)

    def _start(self, config: TrainConfig[Any, Any], algorithm: Algorithm, start: Start, peers: Peers) -> Renewable:
        num_workers = config.num_workers or 1
        stages: Mapping[str, Any] = getattr(algorithm, "stages", {})
        names = [*(f"worker {worker}" for worker in range(num_workers)), "learner", *stages]
        self.tracks = Tracks(processes.context(), names)
        for track, stage in enumerate(stages.values(), start=num_workers + 1):
            stage.note = functools.partial(self.tracks.enter, track)
        settings = CollectorSettings(
            num_workers,
            config.max_lag,
            config.seed if peers.count == 1 else SharedSeed(config.seed, peers.index, peers.count),
            config.deterministic,
            self.tracks,
            config.step_timeout,
            config.max_failures,
            config.on_nan or "stop",
            self.incidents,
            config.algorithm.acceleration,
            start if peers.count == 1 else share_of_start(start, peers),
        )
        mode = lookup("mode", config.mode, MODES)
        if isinstance(self.factory, TensorEnvs):
            return mode.load_for_tensors()(self.factory.envs, algorithm.policy, settings, config.collector)  # type: ignore[no-any-return]
        processes.preload([*WORKER_MODULES, *_entry_point_module(config.env)])
        options = [] if isinstance(config.collector, NoOptions) else [config.collector]
        collector = mode.load()(self.factory, algorithm.policy, settings, *options)
        if getattr(config.collector, "queue_priority", None) == "td-error":
            collector.prefer(algorithm.importance)  # type: ignore[attr-defined]
        return collector  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._collector is not None:
            self._collector.close()
        self.incidents.close()


def run(
    config: TrainConfig[Any, Any], pool: Pool | None = None, series: int = 0, resumed: Checkpoint | None = None
) -> Result:
    """Train as configured; keep what was learned also when the run is interrupted or fails.

    Given a pool, its workers serve: this is the `series`-th training of theirs, and they stay for the next. Given a
    checkpoint, the run goes on from there.
    """
    config = complete(config)
    flat_config = flatten_config(config)
    refuse_hidden(flat_config)
    if resumed is not None:
        check_changes(config, resumed)
    outcome, error = "failed", None
    with contextlib.ExitStack() as stack:
        if pool is not None and config.num_learners > 1:
            raise UserError("several workflows are trained by one learner: leave --num-learners out")
        learner = stack.enter_context(learners.joined(config, functools.partial(run, resumed=resumed)))
        peers, config = learner.peers, learner.config
        if resumed is None or peers.index > 0:
            folder = RunFolder.choose(config.run_dir, flat_config["env"], config.mode)
        else:
            folder = RunFolder(resumed.path.parent.parent)
        if pool is None:
            pool = Pool(_make_envs(config))
            stack.callback(pool.close)
        algorithm = make_algorithm(config, pool.factory, peers)
        _check_fit(config, algorithm)
        budget = Budget(config.total_steps, config.total_episodes)
        ledger = Ledger(first_episode=series << SERIES_BITS) if peers.count == 1 else JointLedger(peers)
        start = Start(series << SERIES_BITS)
        if resumed is not None:
            start = _restore(resumed.state, algorithm, ledger)
            resumed = resumed if peers.index == 0 else None  # the others have no folder to go on in
        state = resumed.state if resumed else {}
        if resumed is not None:
            stack.callback(folder.claim())
        started = time.perf_counter()
        collector = pool.collector(config, algorithm, start, peers)
        startup_seconds = time.perf_counter() - started
        kept_config = without_secrets({**flat_config, "run_dir": None})
        if resumed is None:
            folder.create()
            stack.callback(folder.claim())
        origin.sign(folder.path, kept_config)
        pool.incidents.open(folder.path)
        log = LogFile(folder.log_path)
        stack.callback(log.close)
        trackers = _trackers(TrackedRun(folder.path, kept_config, config.tracking))
        lines = {
            name: Lines(folder.path / f"{name}.jsonl", state["lines"][name] if resumed else None)
            for name in ("metrics", "ledger")
        }
        ledger.write_to(lines["ledger"])
        guard = FiniteGuard(ledger, config.on_nan or "stop", config.seed, pool.incidents)
        sinks: list[MetricSink] = [JsonLines(lines["metrics"]), guard]
        page = _show(folder, config.quiet, stack) if config.watch else None
        if not config.quiet:
            sinks.append(_display(config, flat_config["env"], budget, collector))
        recent = RecentRecords()
        sinks += [recent, *trackers]
        keeper = Keeper(
            Checkpoints(folder.path, config.keep_checkpoints, resumed),
            Interval.read(config.checkpoint_every),
            ledger,
            lambda metrics: (
                None if peers.index > 0 else _state(kept_config, algorithm, ledger, collector.counts(), lines, metrics)
            ),
            ledger.steps,
            is_resumed=resumed is not None,
        )
        sinks.append(keeper)
        keeper.keep()  # so that it can be resumed from now on
        folder.write_config(kept_config)
        folder.drop_results()
        assert pool.tracks is not None
        machine = Machine(int(config.device.partition(":")[2] or 0) if config.device.startswith("cuda") else None)
        gauges = _gauges(config, collector, algorithm.policy, machine, ledger.steps)
        timeline = Timeline(folder.timeline_path, pool.tracks, collector.counts, machine)
        stack.callback(_write_trace, folder)
        stack.callback(timeline.close)
        shares = Shares(config.num_workers or 1, pool.tracks)
        closing = [part.close for part in lines.values()] + [part.close for part in sinks]
        for close in closing + [part.close for part in gauges]:
            stack.callback(close)
        started = time.perf_counter()
        try:
            # The others end with the first.
            mine = interruptible(lambda: keeper.is_at_rest, keeper.ask_to_stop)
            with mine if peers.index == 0 else contextlib.nullcontext():
                learn = functools.partial(train, algorithm, collector, budget, ledger, sinks, gauges, shares)
                if hasattr(collector, "beside"):
                    collector.beside(learn)
                else:
                    learn()
            outcome = "finished"
        except KeyboardInterrupt:
            learner.interrupted()
            outcome = "interrupted"
        except Exception as failure:
            error = str(failure)
            raise
        finally:
            wall_seconds = ledger.seconds_before + time.perf_counter() - started
            summary = {
                "outcome": outcome,
                **({} if error is None else {"error": error}),
                **{name: flat_config[name] for name in ("mode", "algo", "env", "seed", "num_workers", "num_learners")},
                "startup_seconds": startup_seconds,
                **_figures(ledger, collector.counts(), pool.incidents.by_kind, wall_seconds),
                "advice": recent.advice(),
            }
            is_kept = keeper.keep()
            policy = pack_policy(algorithm.policy.arrays, algorithm.policy.describe())
            is_kept = folder.write_results(policy, summary) and is_kept
    return Result(folder.path, summary, algorithm.policy, is_kept, page)


def _state(
    config: dict[str, Any],
    algorithm: Algorithm,
    ledger: Ledger,
    counts: Counts,
    lines: Mapping[str, Lines],
    metrics: Mapping[str, float],
) -> tuple[dict[str, Any], bytes] | None:
    """Everything that it takes to go on from here, and the policy; None if it is not worth keeping."""
    import torch

    if not np.isfinite(algorithm.policy.weights).all():
        logger.warning("weights are not finite any more: no checkpoint is written, the last good one stays")
        return None
    score = metrics.get("eval_return", metrics.get("return_mean", math.nan))
    state = {
        "freerun": version("freerun"),
        "config": config,
        "update": ledger.version,
        "score": score if math.isfinite(score) else None,
        "wall_seconds": metrics.get("wall_seconds", ledger.seconds_before),
        "lines": {name: file.mark() for name, file in lines.items()},
        "counts": dataclasses.asdict(counts),
        "ledger": ledger.state_dict(),
        "algorithm": algorithm.state_dict(),
        "torch_rng": torch.get_rng_state(),
    }
    return state, pack_policy(algorithm.policy.arrays, algorithm.policy.describe())


def _restore(state: Mapping[str, Any], algorithm: Algorithm, ledger: Ledger) -> Start:
    """The algorithm and the books as they were; where collecting goes on."""
    import torch

    check_state(state["algorithm"], algorithm.state_dict())
    try:
        algorithm.load_state_dict(state["algorithm"])
        torch.set_rng_state(state["torch_rng"])
        ledger.load_state_dict(state["ledger"])
        ledger.seconds_before = float(state["wall_seconds"])
        return ledger.start(Counts(**state["counts"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the checkpoint does not fit this run: {error}") from None


def _check_fit(config: TrainConfig[Any, Any], algorithm: Algorithm) -> None:
    """Whether the mode and the display can serve the algorithm."""
    if config.display == "classic" and getattr(config.algorithm, "episodes_per_update", None) is None:
        raise UserError("--display classic counts episodes: give --episodes-per-update")
    config.collector.check(algorithm.demand())
    for name in config.tracking.track:
        TRACKERS[name].load()  # says which package is missing
    if getattr(config.collector, "queue_priority", None) == "td-error" and not hasattr(algorithm, "importance"):
        raise UserError(
            "--queue-priority td-error needs an algorithm with a critic that learns off-policy: --algo sac or mbpo"
        )


def _make_envs(config: TrainConfig[Any, Any]) -> GymnasiumFactory | TensorEnvs:
    if not _is_tensors(config):
        return make_factory(config)
    if config.max_episode_steps is not None:
        raise UserError(
            "--max-episode-steps is not for environments that are tensors: they have a time limit of their own"
        )
    return make_tensors(config, config.collector.num_envs, config.num_workers or 1, config.seed)


def make_tensors(config: TrainConfig[Any, Any], num_envs: int, num_shares: int, seed: int) -> TensorEnvs:
    env_args: dict[str, Any] = dict(config.env_args)
    if is_isaac_task(config.env):
        env_args["headless"] = config.headless
    return TensorEnvs(config.env, num_envs, num_shares, config.device, seed, env_args)


def _is_tensors(config: TrainConfig[Any, Any]) -> bool:
    """Whether the environment is stepped as tensors: if it can be, and the mode can do it."""
    can_be = lookup("mode", config.mode, MODES).for_tensors is not None
    if is_only_tensors(config.env) and not can_be:
        able = [name for name, mode in MODES.items() if mode.for_tensors is not None]
        raise UserError(f"{config.env} is stepped as tensors, which --mode {config.mode} cannot: use {', '.join(able)}")
    return can_be and find_builder(config.env) is not None


def make_factory(config: TrainConfig[Any, Any]) -> GymnasiumFactory:
    """The environments of a run, under its workflows if it has any."""
    if is_only_tensors(config.env):
        raise UserError(
            f"{config.env} is stepped as tensors, never alone: leave out --eval-every, and use freerun eval afterwards"
        )
    cyber, orders = config.cyber, config.cyber.orders()
    names = ("red_agent", "episode_steps", "cyborg_path")
    given = {name: value for name in names if (value := getattr(cyber, name)) is not None}
    if (given or orders) and config.env not in CYBER_ENVS:
        flag = f"--{next(iter(given), 'workflow').replace('_', '-')}"
        raise UserError(f"{flag} is for cyber-defence environments: {' and '.join(CYBER_ENVS)}")
    if "cyborg_path" in given:
        given["cyborg_path"] = str(given["cyborg_path"])
    if not orders:
        return GymnasiumFactory(config.env, {**config.env_args, **given}, config.max_episode_steps)
    weight = DEFAULT_COMPLIANCE_WEIGHT if cyber.compliance_weight is None else cyber.compliance_weight
    workflow = {"env_id": config.env, "workflows": SEPARATOR.join(orders), "compliance_weight": weight}
    return GymnasiumFactory(WorkflowEnv, {**workflow, **config.env_args, **given}, config.max_episode_steps)


def _trackers(run: TrackedRun) -> list[MetricSink]:
    names = dict.fromkeys(run.tracking.track)  # each once
    return [Background(TRACKERS[name].load()(run)) for name in names]


def _show(folder: RunFolder, quiet: bool, stack: contextlib.ExitStack) -> str:
    """On a web page; its address."""
    page = WebPage(folder.path)
    stack.callback(page.close)
    if not quiet:
        print(f"Watch it at {page.url}", file=sys.stderr)
    return page.url


def _write_trace(folder: RunFolder) -> None:
    recording = Recording.of(folder.path)
    if recording is not None:
        try:
            write_trace(recording, folder.trace_path)
        except OSError as error:
            folder.trace_path.unlink(missing_ok=True)
            logger.warning("%s could not be written: %s", folder.trace_path, error.strerror)


def _gauges(
    config: TrainConfig[Any, Any], collector: Collector, policy: Policy, machine: Machine, step: int
) -> list[Gauge]:
    gauges: list[Gauge] = [machine]
    if config.eval_every is not None:
        env = make_factory(config).make(1)
        gauges.append(Trials(env, policy, config.seed, config.eval_every, config.eval_episodes, step))
    if hasattr(collector, "simulator_log"):
        gauges.append(collector.simulator_log)
    return gauges


def _figures(ledger: Ledger, counts: Counts, incidents: Mapping[str, int], wall_seconds: float) -> dict[str, Any]:
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
        "incidents": dict(incidents),
        "ledger": ledger.summary(counts),
    }


def complete(config: TrainConfig[Any, Any]) -> TrainConfig[Any, Any]:
    """Fill in what was left open, so that config.json says everything."""
    changes: dict[str, Any] = {"num_learners": learners.num_learners(config)}
    if is_isaac_task(config.env):
        config = dataclasses.replace(config, env=resolve(config.env))
    if config.total_steps is None and config.total_episodes is None:
        changes["total_steps"] = DEFAULT_TOTAL_STEPS
    if _is_tensors(config):
        changes["collector"] = _for_tensors(config.collector)
        changes["num_workers"] = changes["collector"].num_workers or 1
        if changes["num_learners"] > 1:
            raise UserError("environments that are tensors have one learner so far: leave --num-learners out")
    elif config.num_workers is None:
        one_per_core = max(learners.default_num_workers(), changes["num_learners"])
        changes["num_workers"] = 1 if config.mode == "sequential" else config.collector.num_workers or one_per_core
    if config.device == "auto":
        import torch

        changes["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    mode = lookup("mode", config.mode, MODES)
    takes_turns = mode.takes_turns or config.deterministic
    if config.max_lag is None and not mode.never_waits:
        changes["max_lag"] = 0 if takes_turns else config.algorithm.default_max_lag
    if config.on_nan is None:
        changes["on_nan"] = "stop" if mode.whole_episodes else "continue"
    collector = changes.get("collector", config.collector)
    changes["algorithm"] = _suited(config.algorithm, collector.unit_steps, takes_turns)
    if changes["num_learners"] > 1:
        changes["algorithm"] = _for_several(changes["algorithm"], changes.get("device", config.device))
    return dataclasses.replace(config, **changes)


def _for_tensors(collector: Any) -> Any:
    """A mode's settings, with those that were left open and differ from other environments'."""
    suited = {"num_envs": 64, "num_steps_per_env": 24, "num_collectors": 1}
    fields = {field.name for field in dataclasses.fields(collector)}
    changes = {name: value for name, value in suited.items() if name in fields and getattr(collector, name) is None}
    return dataclasses.replace(collector, **changes)


def _suited(algorithm: Any, unit_steps: int | None, takes_turns: bool) -> Any:
    """The algorithm's settings, with those that were left to the mode."""
    changes: dict[str, Any] = {}
    counts_episodes = getattr(algorithm, "episodes_per_update", None) is not None
    if unit_steps is not None and algorithm.steps_per_update is None and not counts_episodes:
        changes["steps_per_update"] = unit_steps
    if getattr(algorithm, "stages", None) == "auto":
        changes["stages"] = "in-turn" if takes_turns else "concurrent"
    return dataclasses.replace(algorithm, **changes)


def _for_several(algorithm: Any, device: str) -> Any:
    """The algorithm's settings, with those that several learners need."""
    changes = {}
    if getattr(algorithm, "acceleration", None) == "auto" and device.startswith("cuda"):
        changes["acceleration"] = "none"
        logger.warning("several learners do not record their gradient steps as CUDA graphs: one may be faster")
    if getattr(algorithm, "stages", None) == "concurrent":
        changes["stages"] = "in-turn"
    return dataclasses.replace(algorithm, **changes)


def make_algorithm(
    config: TrainConfig[Any, Any], factory: GymnasiumFactory | TensorEnvs, peers: Peers | None = None
) -> Algorithm:
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
    made: Algorithm = algorithm(factory.spec, config.algorithm, config.seed, device, config.deterministic, peers)
    return made


def _entry_point_module(env: EnvName) -> list[str]:
    """A registered environment's own module: loaded in the fork server, it costs workers neither time nor memory."""
    spec = gymnasium.registry.get(env) if isinstance(env, str) else None
    return [spec.entry_point.partition(":")[0]] if spec and isinstance(spec.entry_point, str) else []


def _display(config: TrainConfig[Any, Any], env: str, budget: Budget, collector: Collector) -> MetricSink:
    console = Console(stderr=True)
    title = f"freerun · {env} · {config.algo} · {config.mode} × {collector.num_workers} · seed {config.seed}"
    if config.display == "classic":
        return ClassicLines(title, collector.counts, config.algorithm.episodes_per_update, Console(width=240))
    if config.display == "rsl-rl":
        return RslRlBlocks(title, Console())
    if config.display == "live" or (config.display == "auto" and console.is_terminal):
        return LiveDisplay(title, budget, collector.counts, console)
    return LogLines(title, Console(file=sys.stderr, width=240))


# ---------------------------------------------------------------------------------------------- the Python interface


def train_from_python(
    env: str | Callable[..., gymnasium.Env[Any, Any]] | TensorEnv, *, preset: str | Sequence[str] = (), **settings: Any
) -> Result:
    """Train an agent: `train("CartPole-v1", total_steps=50_000, mode="pipes")`. Settings are the flags' names.

    The environment may also be a `core.TensorEnv` or an RSL-RL VecEnv that is there already; it is closed at the end.
    """
    if hasattr(env, "num_envs") and hasattr(env, "device"):
        settings = {"num_envs": env.num_envs, "device": str(env.device), **settings}
        env = give(env)
    names = [preset] if isinstance(preset, str) else preset
    return run(make_config({**settings_of(names), "env": env, **settings}))


def resume_from_python(run_dir: str | Path, *, trust: Sequence[str] = (), **changes: Any) -> Result:
    """Go on with a run that was stopped or killed: `resume("runs/…", total_steps=200_000)`.

    Code that the folder names must have been trained there by you, or be named again with `trust`.
    """
    path = Path(run_dir)
    found = newest(path)
    options = {**settings_of_run(found, path, changes.get("mode")), **changes}
    origin.check(options, path, [*trust, *(str(value) for value in changes.values())])
    return run(make_config(options), resumed=found)
