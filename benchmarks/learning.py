"""Do freerun's PPO and SAC learn as well as Stable-Baselines3's on the same machine?

PPO is compared with the same settings in both, without lag and with it, and every mode with its default flags, too. SAC
has the same defaults in both. Every run is a process of its own; finished runs are kept in learning.json, so an
interrupted benchmark continues. Runs that were measured with other sources are made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from learning_report import Record, Table, draw, markdown
from pictures import is_drawn
from run_file import RunFile, versions, write_report

from freerun.tools.bench.load_meter import processor

# ---------------------------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Task:
    """The settings that both libraries learn an environment with: SB3's defaults, but for the next three."""

    total_steps: int
    steps_per_update: int = 2000
    """freerun rounds up to whole episodes: 2000 is a multiple of every time limit here (200, 500, 1000 steps)."""
    minibatch_size: int = 80
    """A divisor of 2000: SB3 would learn from what is left over as from a minibatch."""
    num_envs: int = 8
    """SB3 steps so many in turn, steps_per_update / num_envs each; freerun learns the same with any number."""
    learning_rate: float = 3e-4
    num_epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    normalize_obs: bool = False
    normalize_reward: bool = False


@dataclass(frozen=True)
class SACTask:
    """What both libraries' SAC learns with: freerun's defaults, which are SB3's but for `learning_starts`."""

    total_steps: int
    learning_starts: int = 1000
    batch_size: int = 256
    learning_rate: float = 3e-4
    gamma: float = 0.99
    target_rate: float = 0.005
    hidden_units: int = 256
    """In each of two layers."""


# Where all episodes have one length (Pendulum 200, HalfCheetah 1000), num_envs gives SB3 whole episodes as well.
SAC_TASK = ", SAC"
"""The end of the names of tasks that SAC learns. What stands before it is the environment."""
TASKS: dict[str, Task | SACTask] = {
    "CartPole-v1": Task(100_000),
    "Acrobot-v1": Task(150_000, normalize_obs=True),
    "LunarLander-v3": Task(400_000, gamma=0.999, gae_lambda=0.98, entropy_coef=0.01),
    "Pendulum-v1": Task(150_000, num_envs=5, learning_rate=1e-3, gamma=0.9),
    "InvertedPendulum-v5": Task(100_000),
    "HalfCheetah-v5": Task(400_000, num_envs=2, normalize_obs=True, normalize_reward=True),
    f"Pendulum-v1{SAC_TASK}": SACTask(10_000),
    f"InvertedPendulum-v5{SAC_TASK}": SACTask(10_000),
}


@dataclass(frozen=True)
class System:
    label: str
    mode: str | None = None
    """freerun's way of collecting; none is SB3."""
    max_lag: int = 0
    num_workers: int | None = 2
    """None where the mode has none, or decides."""
    lag_correction: str = "decoupled"
    segments: bool = False
    """Collect as SB3 does, from as many environments and as many steps of each, instead of whole episodes."""
    default_flags: bool = False
    """What `freerun train ENV --mode …` does: none of the task's settings but its number of steps."""
    num_envs_of_sac: int | None = None
    """Environments where SAC learns: those of the mode's default would not finish an episode in so few steps."""
    is_one_collector: bool = False
    """The segments are those of a single collector, which steps all environments (--num-envs)."""


REFERENCE, RANDOM = "sb3", "random"
SYSTEMS = {
    REFERENCE: System("sb3"),
    RANDOM: System("random actions"),
    "sequential": System("freerun sequential", "sequential", num_workers=1),
    "sync": System("freerun sync", "sync"),
    "pipes": System("freerun pipes", "pipes"),
    "executor": System("freerun executor", "executor"),
    "ray": System("freerun ray", "ray"),
    "batch": System("freerun batch", "batch", num_workers=None, segments=True, is_one_collector=True),
    "freerun-lag-0": System("freerun lag 0", "freerun"),
    "freerun-lag-1": System("freerun lag 1", "freerun", max_lag=1),
    "freerun-lag-4": System("freerun lag 4", "freerun", max_lag=4),
    "freerun-lag-4-vtrace": System("freerun lag 4, V-trace", "freerun", max_lag=4, lag_correction="vtrace"),
    "freerun-segments": System("freerun segments, lag 1", "freerun", max_lag=1, segments=True),
    "freerun-segments-lag-4": System("freerun segments, lag 4", "freerun", max_lag=4, segments=True),
    "default-flags": System("freerun, default flags", "freerun", default_flags=True),
    **{
        f"{mode}-default-flags": System(
            f"freerun {mode}, default flags",
            mode,
            num_workers=num_workers,
            default_flags=True,
            num_envs_of_sac=num_envs,
        )
        for mode, num_workers, num_envs in (
            ("sequential", None, None),
            ("sync", 2, None),
            ("pipes", 2, None),
            ("executor", 2, None),
            ("ray", 2, None),
            ("batch", None, 2),
            ("continuous", None, 4),  # one for each of its collectors
        )
    },
}


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = tuple(TASKS)
    """Environments to learn."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """Who learns them. Others are compared with sb3, by a margin that rests on random actions."""
    seeds: int = 5
    """Runs of each: seeds 0, 1, …"""
    jobs: int = max(1, (os.cpu_count() or 1) // 2)
    """Runs at a time. Each keeps one core busy, those with workers up to three for moments."""
    fraction: float = 1.0
    """Share of every task's steps, for a quick try."""
    output: Path = Path(__file__).parent / "results" / "learning"
    """Folder for learning.json, learning.md and learning.png."""
    time_limit_seconds: float | None = None
    """Start no run that would end after this, as far as earlier runs of its kind tell; the report names the missing."""
    report_only: bool = False
    """Write learning.md and learning.png again from learning.json, run nothing."""
    fresh: bool = False
    """Run everything again, also what learning.json already holds."""

    def __post_init__(self) -> None:
        for chosen, known in ((self.tasks, TASKS), (self.systems, SYSTEMS)):
            if unknown := set(chosen) - set(known):
                raise SystemExit(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
        if self.seeds < 1 or self.jobs < 1 or self.fraction <= 0:
            raise SystemExit("--seeds and --jobs must be at least 1, --fraction above 0")


@dataclass(frozen=True)
class Plan:
    """A run to be made: everything that decides its outcome."""

    task: str
    system: str
    seed: int
    total_steps: int

    @property
    def settings(self) -> dict[str, Any]:
        system, task = SYSTEMS[self.system], TASKS[self.task]
        of_system: dict[str, Any] = {"mode": system.mode}
        if system.num_workers is not None:
            of_system["num_workers"] = system.num_workers
        if isinstance(task, SACTask) and system.mode is not None:
            of_system["algo"] = "sac"
            if system.num_envs_of_sac is not None:
                of_system["num_envs"] = system.num_envs_of_sac
        if system.default_flags:
            return {**of_system, "total_steps": self.total_steps}
        of_system["max_lag"] = system.max_lag
        if system.lag_correction != "decoupled":
            of_system["lag_correction"] = system.lag_correction
        if system.segments:
            assert isinstance(task, Task)
            num_workers = system.num_workers or 1
            envs_per_worker = task.num_envs // num_workers
            segment_steps = task.steps_per_update // (envs_per_worker * num_workers)
            if system.is_one_collector:  # its --num-envs are the task's
                of_system["num_steps_per_env"] = segment_steps
            else:
                of_system |= {"envs_per_worker": envs_per_worker, "segment_steps": segment_steps}
        return {**asdict(task), **of_system, "total_steps": self.total_steps}

    @property
    def env(self) -> str:
        return self.task.removesuffix(SAC_TASK)

    def __str__(self) -> str:
        return f"{self.task}, {SYSTEMS[self.system].label}, seed {self.seed}"


def plans(options: Options) -> list[Plan]:
    """Seed 0 of everything first, so that an unfinished benchmark covers all; within a seed the longest first."""
    made = [
        Plan(task, system, seed, max(1, round(TASKS[task].total_steps * options.fraction)))
        for seed in range(options.seeds)
        for task in options.tasks
        for system in options.systems
        if is_compared(task, system)
    ]
    return sorted(made, key=lambda plan: (plan.seed, -plan.total_steps))


def is_compared(task: str, system: str) -> bool:
    """SAC learns with the default flags of every mode; PPO with the settings of the tasks, too."""
    return isinstance(TASKS[task], Task) or system in (REFERENCE, RANDOM) or SYSTEMS[system].default_flags


def fulfils(record: Record, plan: Plan) -> bool:
    return is_of(record, plan) and record.settings == plan.settings


def is_of(record: Record, plan: Plan) -> bool:
    return (record.task, record.system, record.seed) == (plan.task, plan.system, plan.seed)


# ---------------------------------------------------------------------------------------------- one run


NUM_RANDOM_EPISODES = 100


def run_random(plan: Plan) -> dict[str, Any]:
    """What somebody gains who learns nothing: a flat curve."""
    import gymnasium

    env = gymnasium.make(plan.env)
    env.reset(seed=plan.seed)
    env.action_space.seed(plan.seed)
    started = time.perf_counter()
    total, num_steps = 0.0, 0
    for _ in range(NUM_RANDOM_EPISODES):
        env.reset()
        ended = False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += float(reward)
            num_steps += 1
            ended = terminated or truncated
    seconds, mean_return = time.perf_counter() - started, total / NUM_RANDOM_EPISODES
    return {
        "wall_seconds": seconds,
        "num_steps": num_steps,
        "num_episodes": NUM_RANDOM_EPISODES,
        "num_updates": 0,
        "lag_mean": 0.0,
        "curve": [(1, mean_return, 0.0), (plan.total_steps, mean_return, seconds)],
    }


def run_sb3(plan: Plan) -> dict[str, Any]:
    import gymnasium
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
    from torch import nn

    task = TASKS[plan.task]
    curve: list[tuple[int, float, float]] = []
    counts = {"episodes": 0, "updates": 0}

    class Progress(BaseCallback):
        def _on_step(self) -> bool:
            counts["episodes"] += int(sum(self.locals["dones"]))
            return True

        def _on_rollout_end(self) -> None:
            counts["updates"] += 1
            recent = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            if recent:
                curve.append((self.num_timesteps, float(np.mean(recent)), time.perf_counter() - started))

    started = time.perf_counter()

    def make_envs(number: int) -> DummyVecEnv:
        # The monitor sits below the normaliser: returns are those of the environment.
        return DummyVecEnv([lambda: Monitor(gymnasium.make(plan.env))] * number)

    def make_sac(task: SACTask) -> SAC:
        return SAC(
            "MlpPolicy",
            make_envs(1),
            learning_rate=task.learning_rate,
            learning_starts=task.learning_starts,
            batch_size=task.batch_size,
            tau=task.target_rate,
            gamma=task.gamma,
            policy_kwargs={"net_arch": [task.hidden_units] * 2},
            stats_window_size=100,
            seed=plan.seed,
            device="cpu",
        )

    def make_ppo(task: Task) -> PPO:
        envs: VecEnv = make_envs(task.num_envs)
        if task.normalize_obs or task.normalize_reward:
            envs = VecNormalize(envs, norm_obs=task.normalize_obs, norm_reward=task.normalize_reward, gamma=task.gamma)
        return PPO(
            "MlpPolicy",
            envs,
            n_steps=task.steps_per_update // task.num_envs,
            learning_rate=task.learning_rate,
            n_epochs=task.num_epochs,
            batch_size=task.minibatch_size,
            gamma=task.gamma,
            gae_lambda=task.gae_lambda,
            clip_range=task.clip_range,
            ent_coef=task.entropy_coef,
            vf_coef=task.value_coef,
            max_grad_norm=task.max_grad_norm,
            policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": nn.Tanh},
            stats_window_size=100,
            seed=plan.seed,
            device="cpu",
        )

    model = make_ppo(task) if isinstance(task, Task) else make_sac(task)
    model.learn(plan.total_steps, callback=Progress())
    return {
        "wall_seconds": time.perf_counter() - started,
        "num_steps": model.num_timesteps,
        "num_episodes": counts["episodes"],
        "num_updates": counts["updates"],
        "lag_mean": 0.0,
        "curve": curve,
    }


def run_freerun(plan: Plan) -> dict[str, Any]:
    import freerun
    import freerun.algorithms.ppo.ppo
    import freerun.experiment  # before the clock starts: imports are not training

    system = SYSTEMS[plan.system]
    is_a_flag = system.is_one_collector or system.default_flags  # else it is what SB3 has
    settings = {name: value for name, value in plan.settings.items() if name != "num_envs" or is_a_flag}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        summary = freerun.train(
            plan.env,
            **settings,
            seed=plan.seed,
            run_dir=folder,
            quiet=True,
        ).summary
        wall_seconds = time.perf_counter() - started
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    points = [
        (line["step"], line["return_mean"], line["wall_seconds"]) for line in lines if line["return_mean"] is not None
    ]
    if not points or points[-1][0] < summary["env_steps"]:
        # The steps ran out between two updates: the last episodes are in the summary alone.
        points.append((summary["env_steps"], summary["mean_return"], summary["wall_seconds"]))
    return {
        "wall_seconds": wall_seconds,
        "num_steps": summary["env_steps"],
        "num_episodes": summary["episodes"],
        "num_updates": summary["updates"],
        "lag_mean": summary["lag_mean"],
        "curve": points,
    }


def run_in_this_process(plan: Plan) -> Record:
    import torch

    torch.set_num_threads(1)
    outcome = {REFERENCE: run_sb3, RANDOM: run_random}.get(plan.system, run_freerun)(plan)
    curve = outcome.pop("curve")
    if not curve:
        raise RuntimeError(f"no episode ended within {plan.total_steps} steps: raise --fraction")
    thinned = [curve[row] for row in np.unique(np.linspace(0, len(curve) - 1, 200).round().astype(int))]
    return Record(
        **outcome,
        task=plan.task,
        system=plan.system,
        seed=plan.seed,
        settings=plan.settings,
        score=curve[-1][1],
        curve=[(step, round(value, 4), round(seconds, 2)) for step, value, seconds in thinned],
        versions=versions(),
        machine=f"{os.cpu_count()} × {processor()}",
    )


# ---------------------------------------------------------------------------------------------- all runs


class Results(RunFile[Record]):
    """learning.json."""

    def __init__(self, path: Path):
        super().__init__(path, Record)

    def forget(self, plan: Plan) -> None:
        self.records = [record for record in self.records if not is_of(record, plan)]
        self.failures = [failure for failure in self.failures if failure["plan"] != asdict(plan)]

    def expected_seconds(self, plan: Plan) -> float:
        """As long as earlier runs of its kind; 0 if there was none."""
        same_kind = (plan.task, plan.system, plan.settings)
        took = [r.process_seconds for r in self.records if (r.task, r.system, r.settings) == same_kind]
        return max(took, default=0.0)


class Job:
    """A run in a process of its own, so that nothing leaks from one run into another."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name) / "record.json"
        self._log = Path(self._folder.name) / "log"
        self._started = time.perf_counter()
        one_core = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "one-run", json.dumps(asdict(plan)), str(self._result)],
                env={**os.environ, **one_core, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, results: Results) -> str:
        """Enter the outcome of an ended process into the results; say it in a line."""
        seconds = time.perf_counter() - self._started
        results.forget(self.plan)
        if self.process.returncode == 0:
            content = json.loads(self._result.read_text(encoding="utf-8"))
            record = Record(**{**content, "process_seconds": seconds})
            results.records.append(record)
            line = f"{self.plan}: {record.score:.1f} in {seconds:.0f} s"
        else:
            log = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
            results.failures.append({"plan": asdict(self.plan), "exit": self.process.returncode, "log": log})
            line = f"{self.plan}: FAILED with exit code {self.process.returncode}\n{log}"
        results.save()
        self._folder.cleanup()
        return line


def run_all(options: Options, results: Results) -> None:
    began = time.perf_counter()
    wanted = plans(options)
    if options.fresh:
        for old in wanted:
            results.forget(old)
    current = [record for record in results.records if results.is_current(record)]
    waiting = [plan for plan in wanted if not any(fulfils(record, plan) for record in current)]
    print(f"{len(wanted)} runs, {len(wanted) - len(waiting)} of them already in {results.path}", flush=True)
    running: list[Job] = []
    num_finished = len(wanted) - len(waiting)

    def startable() -> Iterator[Plan]:
        limit = options.time_limit_seconds
        for plan in waiting:
            ends = time.perf_counter() - began + results.expected_seconds(plan)
            if limit is None or ends < limit:
                yield plan

    try:
        while True:
            while len(running) < options.jobs and (plan := next(startable(), None)) is not None:
                waiting.remove(plan)
                running.append(Job(plan))
            if not running:
                break
            time.sleep(0.1)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                num_finished += 1
                line = job.finish(results)
                print(f"[{num_finished}/{len(wanted)}, {time.perf_counter() - began:.0f} s] {line}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept")
    finally:
        for job in running:
            job.process.terminate()  # workers of freerun end with their learner
            job.process.wait()
    if num_missing := len(waiting) + len(running):
        print(f"{num_missing} runs are missing: the same command continues with them", flush=True)


# ---------------------------------------------------------------------------------------------- the report


def report_on(options: Options, results: Results) -> str:
    most_seeds = max((record.seed + 1 for record in results.records), default=0)
    asked_for = plans(options)
    # Where seeds differ widely, some tasks were given more of them by a call of their own.
    possible = plans(replace(options, seeds=max(options.seeds, most_seeds)))
    found = {plan: record for plan in possible for record in results.records if fulfils(record, plan)}
    wanted = [plan for plan in possible if plan in asked_for or plan in found]
    tables = [
        Table(
            task,
            describe(task, options.fraction),
            {
                SYSTEMS[system].label: [found[p] for p in wanted if (p.task, p.system) == (task, system) and p in found]
                for system in options.systems
                if is_compared(task, system)
            },
            options.seeds,
        )
        for task in options.tasks
    ]
    remarks = [f"{len(found)} of {len(wanted)} runs are in."]
    if others := len(results.records) - len(found):
        remarks.append(f"Left out: {others} runs in learning.json with other settings, or not asked for.")
    missing: dict[str, dict[str, list[int]]] = {}
    for plan in wanted:
        if plan not in found:
            missing.setdefault(SYSTEMS[plan.system].label, {}).setdefault(plan.task, []).append(plan.seed)
    for label, seeds in missing.items():
        of_tasks = "; ".join(f"{task}, seeds {', '.join(map(str, numbers))}" for task, numbers in seeds.items())
        is_all = all(SYSTEMS[plan.system].label != label for plan in found)
        remarks.append(f"Missing: {f'all runs of {label}' if is_all else f'{label}: {of_tasks}'}.")
    if results.failures:
        remarks.append(f"{len(results.failures)} runs failed; learning.json holds their logs.")
    picture = results.path.with_suffix(".png")
    if found and not is_drawn(picture):
        draw(tables, SYSTEMS[REFERENCE].label, picture)
    text = markdown(tables, SYSTEMS[REFERENCE].label, SYSTEMS[RANDOM].label, remarks)
    return write_report(results.path.with_suffix(".md"), text, results.stamped())


def write_reports(folder: Path) -> str:
    return report_on(Options(), Results(folder / "learning.json"))


def describe(task: str, fraction: float) -> str:
    kind = type(TASKS[task])
    defaults = {field.name: field.default for field in fields(kind)}
    special = [f"{name} {value}" for name, value in asdict(TASKS[task]).items() if value != defaults[name]]
    return (
        f"{', '.join(special)}; all else as `{kind.__name__}` has it.{f' Steps × {fraction}.' if fraction != 1 else ''}"
    )


def main() -> None:
    if sys.argv[1:2] == ["one-run"]:
        record = run_in_this_process(Plan(**json.loads(sys.argv[2])))
        Path(sys.argv[3]).write_text(json.dumps(asdict(record)), encoding="utf-8")
        return
    options = tyro.cli(Options, description=__doc__)
    results = Results(options.output / "learning.json")
    if not options.report_only:
        run_all(options, results)
    print(report_on(replace(options, tasks=tuple(TASKS), systems=tuple(SYSTEMS)), results))
    if num_failed := sum(Plan(**failure["plan"]) in plans(options) for failure in results.failures):
        raise SystemExit(f"{num_failed} runs failed; their logs are in {results.path}")


if __name__ == "__main__":
    main()
