"""Does PPO learn from images as well as Stable-Baselines3's, and how long does each take?

Both have the same game, the same CNN and the same settings, which are usual for Atari. The game is an Atari game with
Gymnasium's preprocessing (the extra `atari`), or `catch`, a picture of 44 × 44 pixels in which a ball falls, which is
learned much sooner. Two returns are measured: that of fresh episodes with sampled actions after the training, and that
of the training's own last 100 episodes. Finished runs are kept in atari_learning.json, so an interrupted benchmark
continues.

python benchmarks/atari_learning.py --game ALE/Pong-v5 --total-steps 2000000 --device cuda
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium import spaces
from run_file import RunFile, write_report

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory

NUM_ENVS, STEPS_PER_ENV, MINIBATCH_SIZE, NUM_EPOCHS = 8, 128, 256, 4
LEARNING_RATE, CLIP_RANGE, ENTROPY_COEF, VALUE_COEF = 2.5e-4, 0.1, 0.01, 0.5
FIRST_TRIAL_SEED = 10_000_000
NUM_NOTES = 10
"""The training returns that are kept of a run."""
PAUSE_SECONDS = 3600.0
"""A run may be paused for so long (SIGSTOP) in favour of other programs, without its workers being taken for stuck."""
CATCH, CATCH_SIZE = "catch", 44
Act = Callable[[Any], Any]
"""From an observation to a sampled action."""


@dataclass(frozen=True)
class Options:
    game: str = CATCH
    """catch, or an Atari game such as ALE/Pong-v5."""
    seeds: tuple[int, ...] = (0, 1, 2)
    total_steps: int = 60_000
    """Of every run."""
    device: str = "cpu"
    """Of the learner."""
    learner_threads: int = 1
    trial_episodes: int = 60
    """Fresh episodes after a run."""
    systems: tuple[str, ...] = ("freerun", "freerun, no lag", "Stable-Baselines3")
    output: Path = Path(__file__).parent / "results" / "atari_learning"
    """Folder for atari_learning.json and .md."""
    alone: bool = False
    """Nothing else runs on this machine, so the seconds count. Earlier runs of which that was not said are replaced, as
    are, with or without this, those that were measured with other sources."""
    report_only: bool = False
    """Write the report again, run nothing."""


@dataclass(frozen=True)
class ImageRun:
    system: str
    game: str
    seed: int
    total_steps: int
    device: str
    mean_return: float
    seconds: float
    """Of training, with the start of workers."""
    trial_episodes: int = 20
    """The episodes of `mean_return`. Runs that do not say so had 20."""
    training_returns: tuple[float, ...] = ()
    """The mean return of the last 100 training episodes, after each tenth of the run."""
    learner_threads: int = 1
    alone: bool = False
    """True if nothing else ran on the machine."""

    @property
    def task(self) -> tuple[str, int, str, int]:
        """What systems are compared in."""
        return self.game, self.total_steps, self.device, self.learner_threads


@dataclass(frozen=True)
class Trained:
    """What is left of a run that has just ended."""

    seconds: float
    act: Act
    training_returns: tuple[float, ...]


class ReturnsOnTheWay:
    """Keeps the mean return of the last 100 episodes after each tenth of a run."""

    def __init__(self, total_steps: int):
        self._total_steps = total_steps
        self.returns: list[float] = []

    def note(self, steps: int, mean_return: float) -> None:
        """Take note of the return after an update or a rollout; there are more than ten of them in a run."""
        if NUM_NOTES * steps >= (len(self.returns) + 1) * self._total_steps:
            self.returns.append(mean_return)


class CatchPixels(gymnasium.Env[Any, Any]):
    """+1 if the paddle, five pixels wide, is where the ball comes down; -1 otherwise. Ball and paddle move by 2."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (1, CATCH_SIZE, CATCH_SIZE), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._row, self._column, self._paddle = 0, int(self.np_random.integers(CATCH_SIZE)), CATCH_SIZE // 2
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._paddle = int(np.clip(self._paddle + 2 * (int(action) - 1), 0, CATCH_SIZE - 1))
        self._row += 2
        is_down = self._row >= CATCH_SIZE - 2
        reward = (1.0 if abs(self._paddle - self._column) <= 2 else -1.0) if is_down else 0.0
        return self._look(), reward, is_down, False, {}

    def _look(self) -> Any:
        picture = np.zeros((1, CATCH_SIZE, CATCH_SIZE), np.uint8)
        picture[0, self._row : self._row + 2, max(0, self._column - 1) : self._column + 2] = 255
        picture[0, -2:, max(0, self._paddle - 2) : self._paddle + 3] = 255
        return picture


def recipe(game: str) -> tuple[str, str | None]:
    """The name of an environment, and how it is wrapped."""
    return ("atari_learning:CatchPixels", None) if game == CATCH else (game, "atari")


def make_env(game: str) -> gymnasium.Env[Any, Any]:
    name, wrap = recipe(game)
    return GymnasiumFactory(name, wrap=wrap).make_one().env


def train_freerun(options: Options, seed: int, max_lag: int) -> Trained:
    env, wrap = recipe(options.game)
    on_the_way = ReturnsOnTheWay(options.total_steps)

    def look(update: freerun.Update) -> None:
        on_the_way.note(update.step, update.metrics["return_mean"])

    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        result = freerun.train(
            env,
            wrap=wrap,
            seed=seed,
            total_steps=options.total_steps,
            num_workers=NUM_ENVS,
            segment_steps=STEPS_PER_ENV,
            max_lag=max_lag,
            steps_per_update=NUM_ENVS * STEPS_PER_ENV,
            minibatch_size=MINIBATCH_SIZE,
            num_epochs=NUM_EPOCHS,
            learning_rate=LEARNING_RATE,
            clip_range=CLIP_RANGE,
            entropy_coef=ENTROPY_COEF,
            value_coef=VALUE_COEF,
            normalize_reward=False,
            device=options.device,
            learner_threads=options.learner_threads,
            step_timeout=PAUSE_SECONDS,
            run_dir=Path(scratch) / "run",
            quiet=True,
            on_update=look,
        )
        seconds = time.perf_counter() - started
    policy = result.policy
    return Trained(seconds, lambda obs: policy.predict(obs, deterministic=False), tuple(on_the_way.returns))


def train_sb3(options: Options, seed: int) -> Trained:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecMonitor

    on_the_way = ReturnsOnTheWay(options.total_steps)

    class Look(BaseCallback):
        def _on_rollout_end(self) -> None:
            # Stable-Baselines3 keeps the last 100 episodes here, as freerun does behind `return_mean`.
            returns = [float(episode["r"]) for episode in self.model.ep_info_buffer or ()]
            on_the_way.note(self.num_timesteps, statistics.mean(returns) if returns else float("nan"))

        def _on_step(self) -> bool:
            return True

    torch.set_num_threads(options.learner_threads)
    started = time.perf_counter()
    envs = VecMonitor(SubprocVecEnv([lambda: make_env(options.game) for _ in range(NUM_ENVS)]))
    model = PPO(
        "CnnPolicy",
        envs,
        n_steps=STEPS_PER_ENV,
        batch_size=MINIBATCH_SIZE,
        n_epochs=NUM_EPOCHS,
        learning_rate=LEARNING_RATE,
        clip_range=CLIP_RANGE,
        ent_coef=ENTROPY_COEF,
        vf_coef=VALUE_COEF,
        seed=seed,
        device=options.device,
    )
    model.learn(options.total_steps, callback=Look())
    seconds = time.perf_counter() - started
    envs.close()
    return Trained(seconds, lambda obs: model.predict(obs, deterministic=False)[0], tuple(on_the_way.returns))


SYSTEMS: dict[str, Callable[[Options, int], Trained]] = {
    "freerun": lambda options, seed: train_freerun(options, seed, max_lag=1),
    "freerun, no lag": lambda options, seed: train_freerun(options, seed, max_lag=0),
    "Stable-Baselines3": train_sb3,
}


def trial(act: Act, options: Options) -> float:
    """The mean return of fresh episodes."""
    env, returns = make_env(options.game), []
    for seed in range(FIRST_TRIAL_SEED, FIRST_TRIAL_SEED + options.trial_episodes):
        obs, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(np.int64(act(obs)))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return statistics.mean(returns)


def report(records: list[ImageRun]) -> str:
    lines = [
        "# Learning from images",
        "",
        f"`benchmarks/atari_learning.py`, with the same settings for all: {NUM_ENVS} environments × {STEPS_PER_ENV} "
        f"steps per update, minibatches of {MINIBATCH_SIZE}, {NUM_EPOCHS} epochs, learning rate {LEARNING_RATE:g}, "
        f"clip range {CLIP_RANGE:g}, entropy {ENTROPY_COEF:g}, the Nature CNN, rewards as they are. freerun collects "
        "one update ahead (`--max-lag 1`), or none. Returns are medians of the seeds (lowest – highest): those of "
        "fresh episodes with sampled actions after the training, and those of the training's own last 100 episodes. "
        "The seconds of a training, with the start of its workers, are given where it was alone on the machine.",
        "",
        "| game | steps | learner on | | seeds | fresh episodes | their return | return in training | training takes |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    tasks = dict.fromkeys(one.task for one in records)
    for task in tasks:
        game, steps, device, threads = task
        for system in SYSTEMS:
            if not (found := [one for one in records if (one.system, one.task) == (system, task)]):
                continue
            learner = learner_words(device, threads)
            in_training = [one.training_returns[-1] for one in found if one.training_returns]
            episodes = sorted({one.trial_episodes for one in found})
            seconds = [one.seconds for one in found if one.alone]
            lines.append(
                f"| {game} | {steps:,} | {learner} | {system} | {len(found)} | {' or '.join(map(str, episodes))} | "
                f"{spread([one.mean_return for one in found])} | {spread(in_training)} | "
                f"{spread(seconds, decimals=0, unit=' s')} |"
            )
    lines += ["", *way_there(records)]
    return "\n".join(lines) + "\n"


def spread(values: list[float], decimals: int = 2, unit: str = "") -> str:
    """The median, the lowest and the highest."""
    if not values:
        return "–"
    median, lowest, highest = (f"{one:.{decimals}f}" for one in (statistics.median(values), min(values), max(values)))
    return f"{median}{unit} ({lowest} – {highest})"


def learner_words(device: str, threads: int) -> str:
    return device if threads == 1 else f"{device}, {threads} threads"


def way_there(records: list[ImageRun]) -> list[str]:
    """A table of the training returns after each fifth of the runs that have noted all of them: means of the seeds."""
    lines = [
        "The last 100 episodes of the training on the way, means of the seeds:",
        "",
        "| game | steps | learner on | | seeds | 20 % | 40 % | 60 % | 80 % | 100 % |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    noted = [one for one in records if len(one.training_returns) == NUM_NOTES]
    for task in dict.fromkeys(one.task for one in noted):
        game, steps, device, threads = task
        for system in SYSTEMS:
            found = [one.training_returns[1::2] for one in noted if (one.system, one.task) == (system, task)]
            if found:
                means = " | ".join(f"{statistics.mean(at_once):.2f}" for at_once in zip(*found, strict=True))
                learner = learner_words(device, threads)
                lines.append(f"| {game} | {steps:,} | {learner} | {system} | {len(found)} | {means} |")
    return lines


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "atari_learning.json", ImageRun)
    return write_report(folder / "atari_learning.md", report(file.records), file.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "atari_learning.json", ImageRun)
    task = (options.game, options.total_steps, options.device, options.learner_threads)
    usable = [one for one in file.records if file.is_current(one) and (one.alone or not options.alone)]
    done = {(one.system, one.seed, one.task) for one in usable}
    for seed in () if options.report_only else options.seeds:
        for system in options.systems:
            if (system, seed, task) in done:
                continue
            if system == "Stable-Baselines3" and importlib.util.find_spec("stable_baselines3") is None:
                print(f"{system} is left out: it needs pip install stable-baselines3")
                continue
            trained = SYSTEMS[system](options, seed)
            run = ImageRun(
                system=system,
                game=options.game,
                seed=seed,
                total_steps=options.total_steps,
                device=options.device,
                mean_return=trial(trained.act, options),
                seconds=trained.seconds,
                trial_episodes=options.trial_episodes,
                training_returns=trained.training_returns,
                learner_threads=options.learner_threads,
                alone=options.alone,
            )
            file.replace(run, "system", "seed", "task")
            print(f"{system}, seed {seed}: return {run.mean_return:.2f} after {run.seconds:.0f} s", flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
