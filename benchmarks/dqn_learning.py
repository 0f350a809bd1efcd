"""Does DQN learn as well per step as Stable-Baselines3's, and in how many seconds?

Both learn with the same settings, in turns with collecting; freerun also learns with its own defaults (double,
duelling, returns over three steps, workers beside the learner). Every run is judged twenty times on its way by ten
fresh episodes with the best actions. Finished runs are kept in dqn_learning.json, so an interrupted benchmark
continues; runs of other sources are made again. SB3's runs need `pip install stable-baselines3`, LunarLander
`freerun[box2d]`.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import torch
import tyro
from run_file import RunFile, write_report

import freerun

NUM_TRIALS, TRIAL_EPISODES = 20, 10
FIRST_TRIAL_SEED = 10_000_000


class Task(NamedTuple):
    """What is learned, and the settings of both systems: as tuned for Stable-Baselines3 in its zoo (dqn.yml).

    Only learning starts no sooner than with a batch of steps."""

    total_steps: int
    score: float
    """The mean return of ten episodes that counts as learned."""
    epsilon_steps: int
    epsilon_end: float
    steps_per_update: int
    updates_per_step: float
    target_steps: int
    """The target network is copied whenever this many steps were made."""
    shared: dict[str, Any]
    """Settings that have the same names in both systems."""
    hidden_sizes: tuple[int, ...] = (256, 256)


SLOW_TASK = {"learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 128, "gamma": 0.99}
FAST_TASK = {"learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99}
TASKS = {
    "CartPole-v1": Task(50_000, 475.0, 8_000, 0.04, 256, 0.5, 10, FAST_TASK),
    # The zoo learns for twice as long, with epsilon falling over the same number of steps.
    "Acrobot-v1": Task(50_000, -100.0, 12_000, 0.1, 4, 1.0, 250, SLOW_TASK),
    "LunarLander-v3": Task(100_000, 200.0, 12_000, 0.1, 4, 1.0, 250, SLOW_TASK),
}


class Point(NamedTuple):
    """One trial on the way of a run."""

    steps: int
    seconds: float
    mean_return: float


@dataclass(frozen=True)
class DQNRun:
    task: str
    system: str
    seed: int
    points: list[Point]
    seconds: float
    """Of the whole training, trials included."""

    def reached(self, score: float) -> Point | None:
        """The first trial with this score."""
        return next((Point(*point) for point in self.points if point[2] >= score), None)

    def late_return(self) -> float:
        """The mean of the last five trials, because values swing from one moment to the next."""
        return statistics.mean(point[2] for point in self.points[-5:])


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = ("CartPole-v1", "Acrobot-v1")
    """LunarLander-v3 is known too."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    systems: tuple[str, ...] = ("freerun, SB3's settings", "Stable-Baselines3", "freerun, defaults")
    output: Path = Path(__file__).parent / "results" / "dqn_learning"
    """Folder for dqn_learning.json and .md."""
    report_only: bool = False
    """Write the report again, run nothing."""


def train_freerun(name: str, seed: int, **settings: Any) -> tuple[list[Point], float]:
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        result = freerun.train(
            name,
            algo="dqn",
            seed=seed,
            total_steps=task.total_steps,
            eval_every=task.total_steps // NUM_TRIALS,
            eval_episodes=TRIAL_EPISODES,
            run_dir=Path(scratch) / "run",
            quiet=True,
            **settings,
        )
        seconds = time.perf_counter() - started
        lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    points: dict[float, Point] = {}
    for record in map(json.loads, lines):
        if "eval_return" in record and record["eval_step"] not in points:
            points[record["eval_step"]] = Point(int(record["eval_step"]), record["wall_seconds"], record["eval_return"])
    return list(points.values()), seconds


def train_freerun_as_sb3(name: str, seed: int) -> tuple[list[Point], float]:
    task = TASKS[name]
    return train_freerun(
        name,
        seed,
        mode="sequential",
        steps_per_update=task.steps_per_update,
        updates_per_step=task.updates_per_step,
        target_rate=1.0,
        # SB3 copies the target network only between its updates, however short the interval is.
        target_interval=round(max(task.target_steps, task.steps_per_update) * task.updates_per_step),
        epsilon_steps=task.epsilon_steps,
        epsilon_end=task.epsilon_end,
        huber_delta=1.0,  # SB3's loss: smooth L1
        max_grad_norm=10.0,
        double=False,
        duelling=False,
        num_return_steps=1,
        hidden_sizes=task.hidden_sizes,
        **task.shared,
    )


def train_sb3(name: str, seed: int) -> tuple[list[Point], float]:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)  # as freerun's learner
    task, points = TASKS[name], []
    trial_env = gymnasium.make(name)

    class Trials(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % (task.total_steps // NUM_TRIALS) == 0:
                score = trial(lambda obs: self.model.predict(obs, deterministic=True)[0], trial_env)
                points.append(Point(self.num_timesteps, time.perf_counter() - started, score))
            return True

    started = time.perf_counter()
    model = stable_baselines3.DQN(
        "MlpPolicy",
        gymnasium.make(name),
        train_freq=task.steps_per_update,
        gradient_steps=int(task.steps_per_update * task.updates_per_step),
        target_update_interval=task.target_steps,
        exploration_fraction=task.epsilon_steps / task.total_steps,
        exploration_final_eps=task.epsilon_end,
        policy_kwargs={"net_arch": list(task.hidden_sizes)},
        seed=seed,
        device="cpu",
        **task.shared,
    )
    model.learn(task.total_steps, callback=Trials())
    return points, time.perf_counter() - started


def trial(act: Callable[[Any], Any], env: gymnasium.Env[Any, Any]) -> float:
    """The mean return of fresh episodes, the same at every trial."""
    returns = []
    for seed in range(FIRST_TRIAL_SEED, FIRST_TRIAL_SEED + TRIAL_EPISODES):
        obs, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.mean(returns)


SYSTEMS: dict[str, Callable[[str, int], tuple[list[Point], float]]] = {
    "freerun, SB3's settings": train_freerun_as_sb3,
    "Stable-Baselines3": train_sb3,
    "freerun, defaults": train_freerun,
}


def report(records: list[DQNRun]) -> str:
    lines = [
        "# DQN beside Stable-Baselines3",
        "",
        "`benchmarks/dqn_learning.py`: the first two have the same settings, those of SB3's zoo, and collect and learn "
        "in turns. The third has freerun's defaults: double, duelling, three-step returns, one gradient step per step, "
        f"and workers beside the learner. Every run is tried {NUM_TRIALS} times on its way by {TRIAL_EPISODES} fresh "
        "episodes with the best actions; the seconds contain these trials.",
        "",
        "| task | system | seeds | reached the score | steps until then | seconds until then | return at the end "
        "(lowest, highest) | seconds, whole run |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, task in TASKS.items():
        for system in SYSTEMS:
            found = [record for record in records if (record.task, record.system) == (name, system)]
            if not found:
                continue
            points = [point for record in found if (point := record.reached(task.score)) is not None]
            late = sorted(record.late_return() for record in found)
            until = (
                f"{statistics.median(point.steps for point in points):,.0f} | "
                f"{statistics.median(point.seconds for point in points):.1f}"
                if points
                else "– | –"
            )
            lines.append(
                f"| {name}, {task.total_steps:,} steps, {task.score:g} | {system} | {len(found)} | {len(points)} | "
                f"{until} | {statistics.median(late):.0f} ({late[0]:.0f}, {late[-1]:.0f}) | "
                f"{statistics.median(record.seconds for record in found):.1f} |"
            )
    lines += [
        "",
        "Numbers are medians over seeds; those until the score are over the runs that reached it, and the return at "
        "the end is the mean of the last five trials of a run.",
    ]
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "dqn_learning.json", DQNRun)
    return write_report(folder / "dqn_learning.md", report(file.records), file.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "dqn_learning.json", DQNRun)
    done = {(record.task, record.system, record.seed) for record in file.records if file.is_current(record)}
    for name in options.tasks:
        for seed in options.seeds:
            for system in options.systems:
                train = SYSTEMS[system]
                if options.report_only or (name, system, seed) in done:
                    continue
                if train is train_sb3 and importlib.util.find_spec("stable_baselines3") is None:
                    print(f"{system} is left out: it needs pip install stable-baselines3")
                    continue
                points, seconds = train(name, seed)
                file.replace(DQNRun(name, system, seed, points, seconds), "task", "system", "seed")
                late = file.records[-1].late_return()
                print(f"{name}, {system}, seed {seed}: return {late:.0f} after {seconds:.1f} s", flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
