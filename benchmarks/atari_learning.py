"""Does PPO learn from images as well as Stable-Baselines3's, and how long does each take?

Both have the same game, the same CNN and the same settings, which are usual for Atari. The game is an Atari game with
Gymnasium's preprocessing (the extra `atari`), or `catch`, a picture of 44 × 44 pixels in which a ball falls, which is
learned much sooner. The return is the mean of fresh episodes with sampled actions. Finished runs are kept in
atari_learning.json, so an interrupted benchmark continues.

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
    trial_episodes: int = 20
    """Fresh episodes after a run."""
    systems: tuple[str, ...] = ("freerun", "freerun, no lag", "Stable-Baselines3")
    output: Path = Path(__file__).parent / "results" / "atari_learning"
    """Folder for atari_learning.json and .md."""
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


def train_freerun(options: Options, seed: int, max_lag: int) -> tuple[float, Act]:
    env, wrap = recipe(options.game)
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
            run_dir=Path(scratch) / "run",
            quiet=True,
        )
        seconds = time.perf_counter() - started
    policy = result.policy
    return seconds, lambda obs: policy.predict(obs, deterministic=False)


def train_sb3(options: Options, seed: int) -> tuple[float, Act]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_num_threads(options.learner_threads)
    started = time.perf_counter()
    envs = SubprocVecEnv([lambda: make_env(options.game) for _ in range(NUM_ENVS)])
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
    model.learn(options.total_steps)
    seconds = time.perf_counter() - started
    envs.close()
    return seconds, lambda obs: model.predict(obs, deterministic=False)[0]


SYSTEMS: dict[str, Callable[[Options, int], tuple[float, Act]]] = {
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
        f"clip range {CLIP_RANGE:g}, entropy {ENTROPY_COEF:g}, the Nature CNN, rewards as they are. The return is that "
        "of fresh episodes with sampled actions. freerun collects one update ahead (`--max-lag 1`), or none.",
        "",
        "| game | steps | learner on | | seeds | return, median | lowest | highest | training, median |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for game, steps, device in dict.fromkeys((one.game, one.total_steps, one.device) for one in records):
        for system in SYSTEMS:
            place = (system, game, steps, device)
            found = [one for one in records if (one.system, one.game, one.total_steps, one.device) == place]
            if found:
                returns, seconds = [one.mean_return for one in found], [one.seconds for one in found]
                lines.append(
                    f"| {game} | {steps:,} | {device} | {system} | {len(found)} | {statistics.median(returns):.2f} | "
                    f"{min(returns):.2f} | {max(returns):.2f} | {statistics.median(seconds):.0f} s |"
                )
    lines += ["", "Others may have used the machine at the same time."]
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "atari_learning.json", ImageRun)
    return write_report(folder / "atari_learning.md", report(file.records), file.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "atari_learning.json", ImageRun)
    done = {(one.system, one.game, one.seed, one.total_steps, one.device) for one in file.records}
    for seed in () if options.report_only else options.seeds:
        for system in options.systems:
            if (system, options.game, seed, options.total_steps, options.device) in done:
                continue
            if system == "Stable-Baselines3" and importlib.util.find_spec("stable_baselines3") is None:
                print(f"{system} is left out: it needs pip install stable-baselines3")
                continue
            seconds, act = SYSTEMS[system](options, seed)
            run = ImageRun(
                system, options.game, seed, options.total_steps, options.device, trial(act, options), seconds
            )
            file.records.append(run)
            file.save()
            print(f"{system}, seed {seed}: return {run.mean_return:.2f} after {seconds:.0f} s", flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
