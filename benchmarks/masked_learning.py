"""Does PPO with action masks learn as well as sb3-contrib's MaskablePPO, and what do masks gain?

Both learn `freerun/NetworkDefence-v0` with its masks and the same settings; freerun learns it without masks too. The
return is the mean of fresh episodes, the same for all, with the most likely allowed actions. Finished runs are kept in
masked_learning.json, so an interrupted benchmark continues. MaskablePPO needs `pip install sb3-contrib`.
"""

from __future__ import annotations

import importlib.metadata
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
from run_file import RunFile, others_beside, write_report

import freerun
from freerun_envs.single_network import NetworkDefence

ENV = "freerun/NetworkDefence-v0"
NUM_ENVS, STEPS_PER_ENV = 8, 250
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2}
MINIBATCH_SIZE, NUM_EPOCHS, MAX_GRAD_NORM, VALUE_COEF = 80, 10, 0.5, 0.5
"""SB3's defaults but for the learning rate, and for sizes of which one is a multiple of the other."""
FIRST_TRIAL_SEED = 10_000_000
Act = Callable[[Any, Any], Any]
"""From an observation and a mask to an action."""


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    total_steps: int = 30_000
    """Of every run."""
    trial_episodes: int = 50
    """Fresh episodes after a run."""
    output: Path = Path(__file__).parent / "results" / "masked_learning"
    """Folder for masked_learning.json and .md."""
    alone: bool = False
    """Nothing else runs on this machine, so the seconds count. Earlier runs of which that was not said are replaced, as
    are, with or without this, those that were measured with other sources."""
    report_only: bool = False
    """Write the report again, run nothing."""


@dataclass(frozen=True)
class MaskedRun:
    system: str
    seed: int
    total_steps: int
    mean_return: float
    seconds: float
    """Of training."""
    alone: bool = False
    """True if nothing else ran on the machine."""


class MaskMethod(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Offers the mask as MaskablePPO asks for it."""

    def action_masks(self) -> Any:
        return self.mask

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        self.mask = info["action_mask"]
        return obs, info

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self.mask = result[4]["action_mask"]
        return result


def train_freerun(seed: int, total_steps: int, action_mask: bool) -> tuple[float, Act]:
    """Collect as SB3 does: from as many environments, and as many steps of each, with the weights of now."""
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        result = freerun.train(
            ENV,
            env_args={"action_mask": action_mask},
            seed=seed,
            total_steps=total_steps,
            num_workers=1,
            envs_per_worker=NUM_ENVS,
            segment_steps=STEPS_PER_ENV,
            max_lag=0,
            steps_per_update=NUM_ENVS * STEPS_PER_ENV,
            minibatch_size=MINIBATCH_SIZE,
            num_epochs=NUM_EPOCHS,
            max_grad_norm=MAX_GRAD_NORM,
            value_coef=VALUE_COEF,
            hidden_sizes=(64, 64),
            run_dir=Path(scratch) / "run",
            quiet=True,
            **SETTINGS,
        )
        seconds = time.perf_counter() - started
    policy = result.policy
    return seconds, lambda obs, mask: policy.predict(obs, action_mask=mask if action_mask else None)


def train_maskable_ppo(seed: int, total_steps: int) -> tuple[float, Act]:
    import sb3_contrib
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(1)  # as freerun's learner
    envs = DummyVecEnv([lambda: MaskMethod(NetworkDefence(action_mask=True)) for _ in range(NUM_ENVS)])
    started = time.perf_counter()
    model = sb3_contrib.MaskablePPO(
        "MlpPolicy",
        envs,
        n_steps=STEPS_PER_ENV,
        batch_size=MINIBATCH_SIZE,
        n_epochs=NUM_EPOCHS,
        max_grad_norm=MAX_GRAD_NORM,
        vf_coef=VALUE_COEF,
        seed=seed,
        device="cpu",
        **SETTINGS,
    )
    model.learn(total_steps)
    seconds = time.perf_counter() - started
    return seconds, lambda obs, mask: model.predict(obs, action_masks=mask, deterministic=True)[0]


SYSTEMS: dict[str, Callable[[int, int], tuple[float, Act]]] = {
    "freerun with masks": lambda seed, steps: train_freerun(seed, steps, action_mask=True),
    "MaskablePPO": train_maskable_ppo,
    "freerun without masks": lambda seed, steps: train_freerun(seed, steps, action_mask=False),
}


def trial(act: Act, num_episodes: int) -> float:
    """The mean return of fresh episodes."""
    env, returns = NetworkDefence(action_mask=True), []
    for seed in range(FIRST_TRIAL_SEED, FIRST_TRIAL_SEED + num_episodes):
        obs, info = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            obs, reward, _, ended, info = env.step(np.int64(act(obs, info["action_mask"])))
            total += reward
        returns.append(total)
    return statistics.mean(returns)


def report(records: list[MaskedRun], total_steps: int) -> str:
    settings = ", ".join(f"{name} {value:g}" for name, value in SETTINGS.items())
    lines = [
        "# Learning with action masks",
        "",
        f"`benchmarks/masked_learning.py`: `{ENV}` (B_lineAgent, 100 steps an episode), {total_steps:,} steps, "
        f"with the same settings for all: {NUM_ENVS} environments × {STEPS_PER_ENV} steps per update, minibatches of "
        f"{MINIBATCH_SIZE}, {NUM_EPOCHS} epochs, {settings}. The return is that of fresh episodes with the most likely "
        "actions.",
        "",
        "| | seeds | return, median | lowest | highest | training, median |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for system in SYSTEMS:
        found = [record for record in records if record.system == system and record.total_steps == total_steps]
        if found:
            returns, seconds = [one.mean_return for one in found], [one.seconds for one in found]
            lines.append(
                f"| {system} | {len(found)} | {statistics.median(returns):.1f} | {min(returns):.1f} | "
                f"{max(returns):.1f} | {statistics.median(seconds):.1f} s |"
            )
    lines += [
        "",
        "Both collect and learn in turns. " + others_beside(records),
    ]
    return "\n".join(lines) + "\n"


def write_reports(folder: Path, total_steps: int = Options.total_steps) -> str:
    file = RunFile(folder / "masked_learning.json", MaskedRun)
    return write_report(folder / "masked_learning.md", report(file.records, total_steps), file.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "masked_learning.json", MaskedRun)
    usable = [one for one in file.records if file.is_current(one) and (one.alone or not options.alone)]
    done = {(one.system, one.seed, one.total_steps) for one in usable}
    for seed in options.seeds:
        for system, train in SYSTEMS.items():
            if options.report_only or (system, seed, options.total_steps) in done:
                continue
            if train is train_maskable_ppo and importlib.util.find_spec("sb3_contrib") is None:
                print(f"{system} is left out: it needs pip install sb3-contrib")
                continue
            seconds, act = train(seed, options.total_steps)
            score = trial(act, options.trial_episodes)
            record = MaskedRun(system, seed, options.total_steps, score, seconds, options.alone)
            file.replace(record, "system", "seed", "total_steps")
            print(f"{system}, seed {seed}: return {score:.1f} after {seconds:.1f} s", flush=True)
    print(write_reports(options.output, options.total_steps))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
