"""How long an update of PPO with the Nature CNN takes, beside Stable-Baselines3's, on a CPU.

Both learn from the same number of images of 84 × 84 × 4 bytes, with the settings of atari_learning.py. The fastest of a
few updates counts, because other programs on the machine can only make one slower. Numbers and a table are written to
results/image_learner. It needs `pip install stable-baselines3`.
"""

from __future__ import annotations

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
from run_file import ResultFile, write_report

from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, ImagePart, Segment
from freerun.settings.factories import limit_threads
from freerun.tools.bench.load_meter import processor

SHAPE, NUM_CHOICES = (4, 84, 84), 6
NUM_ENVS, STEPS_PER_ENV, MINIBATCH_SIZE, NUM_EPOCHS = 8, 128, 256, 4
SETTINGS: dict[str, Any] = {"learning_rate": 2.5e-4, "clip_range": 0.1}


@dataclass(frozen=True)
class Options:
    threads: tuple[int, ...] = (1, 2)
    """Threads of the learner."""
    updates: int = 3
    """Updates of which the fastest counts."""
    beside: str = "nothing else ran"
    """What ran on the machine at the same time, for the report."""
    output: Path = Path(__file__).parent / "results" / "image_learner"
    """Folder for image_learner.json and .md."""


class Noise(gymnasium.Env[Any, Any]):
    """Images of noise, without end."""

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(NUM_CHOICES)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._image = self.np_random.integers(0, 256, SHAPE, np.uint8)
        return self._image, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._image, 0.0, False, False, {}


def freerun_update(lag: int) -> Callable[[], object]:
    """An update on segments that were collected `lag` versions ago, up to the weights for the workers."""
    spec = EnvSpec(Noise.observation_space, Noise.action_space, images=(ImagePart(0, SHAPE),))
    own: dict[str, Any] = {"entropy_coef": 0.01, "value_coef": 0.5, "normalize_reward": False, "num_epochs": NUM_EPOCHS}
    sizes: dict[str, Any] = {"minibatch_size": MINIBATCH_SIZE, "steps_per_update": NUM_ENVS * STEPS_PER_ENV}
    algorithm = PPO(spec, PPOConfig(network="nature", **SETTINGS, **own, **sizes), 0, "cpu", False)
    rng, here = np.random.default_rng(0), (STEPS_PER_ENV, 1)
    segments = []
    for number in range(NUM_ENVS):
        images = rng.integers(0, 256, (STEPS_PER_ENV + 1, 1, *SHAPE), np.uint8)
        choice, no, zero = rng.integers(0, NUM_CHOICES, here), np.zeros(here, np.bool_), np.zeros(here, np.int64)
        log_prob, reward = np.full(here, -np.log(NUM_CHOICES), np.float32), rng.normal(size=here).astype(np.float32)
        episode = np.full(here, number)
        segments.append(Segment(images[:-1], choice, log_prob, reward, no, no, images[1:], episode, zero, seconds=1.0))

    def update() -> None:
        algorithm.observe(segments)
        algorithm.update(version=lag, progress=0.0)

    return update


def sb3_update() -> Callable[[], object]:
    from stable_baselines3 import PPO as TheirPPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    own: dict[str, Any] = {"ent_coef": 0.01, "vf_coef": 0.5, "n_epochs": NUM_EPOCHS}
    sizes: dict[str, Any] = {"n_steps": STEPS_PER_ENV, "batch_size": MINIBATCH_SIZE}
    envs = DummyVecEnv([Noise] * NUM_ENVS)
    model = TheirPPO("CnnPolicy", envs, **SETTINGS, **own, **sizes, seed=0, device="cpu")
    _, callback = model._setup_learn(NUM_ENVS * STEPS_PER_ENV)
    model.collect_rollouts(envs, callback, model.rollout_buffer, STEPS_PER_ENV)
    return model.train


SYSTEMS: dict[str, Callable[[], Callable[[], object]]] = {
    "freerun, no lag": lambda: freerun_update(0),
    "freerun, a lag of 1": lambda: freerun_update(1),
    "Stable-Baselines3": sb3_update,
}


def report(found: dict[str, Any]) -> str:
    lines = [
        "# An update with the Nature CNN on a CPU",
        "",
        f"`benchmarks/image_learner.py`: seconds of {NUM_EPOCHS} epochs over {NUM_ENVS * STEPS_PER_ENV:,} images of "
        f"84 × 84 × 4 bytes in minibatches of {MINIBATCH_SIZE}, with what comes before and after, the fastest of "
        f"{found['updates']}.",
        "",
        f"| | {' | '.join(f'threads: {number}' for number in found['threads'])} |",
        f"| --- |{' ---: |' * len(found['threads'])}",
        *(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |" for name, cells in found["seconds"].items()),
        "",
        f"Beside it: {found['beside']}. {found['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "image_learner.md", report(file.content), file.stamped())


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "image_learner.json", {}, lambda _: ["all"])


def main(options: Options) -> None:
    seconds: dict[str, list[float]] = {}
    for name, make in SYSTEMS.items():
        torch.set_num_threads(max(options.threads))
        update, seconds[name] = make(), []
        for num_threads in options.threads:
            limit_threads(of_torch=num_threads, of_numpy=1)
            times = []
            for _ in range(options.updates):
                started = time.perf_counter()
                update()
                times.append(time.perf_counter() - started)
            seconds[name].append(min(times))
    found = {"updates": options.updates, "threads": options.threads, "seconds": seconds}
    found |= {"beside": options.beside, "machine": processor()}
    file = open_results(options.output)
    file.content = found
    file.save("all")
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
