"""Does PPO with a memory learn as fast as sb3-contrib's RecurrentPPO, and what does the memory cost a worker?

Both learn `freerun/TMaze-v0`, which no policy without a memory can solve, with the same settings. A run has learned
once the mean return of its last 100 training episodes reaches 0.9 (1 is the best). What it forgets afterwards shows in
the mean return from then on. `default flags` is what `freerun train freerun/TMaze-v0 --memory gru` does. Finished runs
are kept in memory_learning.json, so an interrupted benchmark continues. RecurrentPPO needs `pip install sb3-contrib`.
"""

from __future__ import annotations

import importlib.metadata
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
import numpy as np
import torch
import tyro
from run_file import ResultFile, RunFile, others_beside, write_report

import freerun
import freerun.adapters.catalog  # registers the environments of freerun with Gymnasium, for RecurrentPPO
from freerun.algorithms.policies.memory_actor import MemoryActor
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.core import FloatArray

ENV = "freerun/TMaze-v0"
GOAL, LAST_EPISODES = 0.9, 100
ACTOR_COSTS = "actor_costs.json"
NUM_ENVS, STEPS_PER_ENV = 8, 128
MEMORY_SIZE, HIDDEN_SIZES = 64, (64, 64)
SETTINGS: dict[str, Any] = {"learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2}
MINIBATCH_SIZE, NUM_EPOCHS, MAX_GRAD_NORM, VALUE_COEF = 128, 10, 0.5, 0.5
"""All of these are the defaults of RecurrentPPO but for the size of its memory, which is 256 there."""
NUM_TIMED = 4000


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    total_steps: int = 60_000
    """Of every run."""
    output: Path = Path(__file__).parent / "results" / "memory_learning"
    """Folder for memory_learning.json and .md."""
    alone: bool = False
    """Nothing else runs on this machine, so the seconds count. Earlier runs of which that was not said are replaced, as
    are, with or without this, those that were measured with other sources."""
    report_only: bool = False
    """Write the report again, run nothing."""


@dataclass(frozen=True)
class MemoryRun:
    system: str
    seed: int
    total_steps: int
    steps_to_goal: int | None
    """Steps until the goal was reached; None if it was not."""
    seconds_to_goal: float | None
    best_return: float
    """The highest mean return of the last episodes."""
    seconds: float
    """Of the whole training."""
    alone: bool = False
    """True if nothing else ran on the machine."""
    return_after_goal: float | None = None
    """The mean return over all updates from the one on that reached the goal; None if there was none."""


class Point(NamedTuple):
    """A point of a learning curve."""

    steps: int
    seconds: float
    mean_return: float


def train_freerun(seed: int, total_steps: int, memory: str, **settings: Any) -> list[Point]:
    with tempfile.TemporaryDirectory() as scratch:
        common = {"seed": seed, "total_steps": total_steps, "run_dir": Path(scratch) / "run", "quiet": True}
        result = freerun.train(ENV, memory=memory, **common, **settings)
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [Point(line["step"], line["wall_seconds"], line["return_mean"]) for line in lines]


AS_RECURRENT_PPO: dict[str, Any] = {
    "num_workers": 1,
    "envs_per_worker": NUM_ENVS,
    "segment_steps": STEPS_PER_ENV,
    "max_lag": 0,
    "steps_per_update": NUM_ENVS * STEPS_PER_ENV,
    "minibatch_size": MINIBATCH_SIZE,
    "num_epochs": NUM_EPOCHS,
    "max_grad_norm": MAX_GRAD_NORM,
    "value_coef": VALUE_COEF,
    "hidden_sizes": HIDDEN_SIZES,
    "memory_size": MEMORY_SIZE,
    "normalize_obs": False,
    "normalize_reward": False,
    **SETTINGS,
}
"""As many environments, as many steps of each, and the weights of now."""


def train_recurrent_ppo(seed: int, total_steps: int) -> list[Point]:
    import sb3_contrib
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Curve(BaseCallback):
        """Notes the mean return before every update."""

        points: list[Point]

        def _on_training_start(self) -> None:
            self.points, self._started = [], time.perf_counter()

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            seconds = time.perf_counter() - self._started
            self.points.append(Point(self.num_timesteps, seconds, statistics.mean(returns)))

    torch.set_num_threads(1)  # as freerun's learner
    envs = DummyVecEnv([lambda: Monitor(gymnasium.make(ENV)) for _ in range(NUM_ENVS)])
    curve = Curve()
    model = sb3_contrib.RecurrentPPO(
        "MlpLstmPolicy",
        envs,
        n_steps=STEPS_PER_ENV,
        batch_size=MINIBATCH_SIZE,
        n_epochs=NUM_EPOCHS,
        max_grad_norm=MAX_GRAD_NORM,
        vf_coef=VALUE_COEF,
        policy_kwargs={"lstm_hidden_size": MEMORY_SIZE, "net_arch": list(HIDDEN_SIZES)},
        seed=seed,
        device="cpu",
        **SETTINGS,
    )
    model.learn(total_steps, callback=curve)
    return curve.points


SYSTEMS: dict[str, Callable[[int, int], list[Point]]] = {
    "freerun, LSTM": lambda seed, steps: train_freerun(seed, steps, "lstm", **AS_RECURRENT_PPO),
    "freerun, GRU": lambda seed, steps: train_freerun(seed, steps, "gru", **AS_RECURRENT_PPO),
    "RecurrentPPO (LSTM)": train_recurrent_ppo,
    "freerun, no memory": lambda seed, steps: train_freerun(seed, steps, "none", **AS_RECURRENT_PPO),
    "freerun, GRU, advantages not scaled": lambda seed, steps: train_freerun(
        seed, steps, "gru", normalize_advantage=False, **AS_RECURRENT_PPO
    ),
    "freerun, GRU, default flags": lambda seed, steps: train_freerun(seed, steps, "gru"),
}


def summarised(system: str, seed: int, total_steps: int, points: list[Point], alone: bool) -> MemoryRun:
    first = next((number for number, point in enumerate(points) if point.mean_return >= GOAL), None)
    best = max(point.mean_return for point in points)
    steps, seconds = (None, None) if first is None else points[first][:2]
    after = None if first is None else statistics.mean(point.mean_return for point in points[first:])
    return MemoryRun(system, seed, total_steps, steps, seconds, best, points[-1].seconds, alone, after)


# ---------------------------------------------------------------------------------------------- the cost of a step


def actor_costs(repeats: int = 9) -> dict[str, float]:
    """Microseconds of one action for one observation, the lowest of several repetitions, which take turns."""
    spec, rng = ActorSpec(4, HIDDEN_SIZES, "tanh", (2,), 0, normalize_obs=True), np.random.default_rng(0)
    obs = rng.standard_normal((NUM_TIMED, 4)).astype(np.float32)
    actors: dict[str, MLPActor | MemoryActor] = {
        "MLP": MLPActor(spec, scalar_actions=True),
        "GRU": MemoryActor(spec, "gru", MEMORY_SIZE, scalar_actions=True),
        "LSTM": MemoryActor(spec, "lstm", MEMORY_SIZE, scalar_actions=True),
    }
    for actor in actors.values():
        weights = rng.normal(0, 0.1, actor.weights.size).astype(np.float32)
        # Observations that never come again make the cache of outputs useless, and `load` finds that out.
        for _ in range(2):
            actor.load(weights)
            _play(actor, obs)
        actor.load(weights)
    found: dict[str, list[float]] = {name: [] for name in actors}
    for _ in range(repeats):
        for name, actor in actors.items():
            started = time.process_time()
            _play(actor, obs)
            found[name].append((time.process_time() - started) / NUM_TIMED * 1e6)
    return {name: min(times) for name, times in found.items()}


def _play(actor: MLPActor | MemoryActor, obs: FloatArray) -> None:
    if isinstance(actor, MemoryActor):
        act = actor.single_from(np.zeros(actor.memory_size, np.float32))
    else:
        act = actor.single()
    noise, head = np.zeros(2, np.float32), np.zeros(2, np.float32)
    for row in obs:
        act(row, noise, head)


# ---------------------------------------------------------------------------------------------- the report


def report(records: list[MemoryRun], total_steps: int, costs: dict[str, float]) -> str:
    settings = ", ".join(f"{name} {value:g}" for name, value in SETTINGS.items())
    lines = [
        "# Learning with a memory",
        "",
        f"`benchmarks/memory_learning.py`: `{ENV}` (10 steps from the signal to the junction), {total_steps:,} steps, "
        f"with the same settings for all but the last row: {NUM_ENVS} environments × {STEPS_PER_ENV} steps per "
        f"update, minibatches of {MINIBATCH_SIZE}, {NUM_EPOCHS} epochs, {MEMORY_SIZE} units, {settings}. The goal is a "
        f"mean return of {GOAL} in the last {LAST_EPISODES} training episodes; 1 is the best, and 0 the best without a "
        "memory.",
        "",
        "| | seeds | reached the goal | steps to the goal, median | seconds to the goal, median | best return, median "
        "| return from then on, median (lowest) | whole training, median |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for system in SYSTEMS:
        found = [record for record in records if record.system == system and record.total_steps == total_steps]
        if found:
            # A run that did not get there counts as later than all others.
            steps = statistics.median(record.steps_to_goal or float("inf") for record in found)
            seconds = statistics.median(record.seconds_to_goal or float("inf") for record in found)
            after = [record.return_after_goal for record in found if record.return_after_goal is not None]
            lines.append(
                f"| {system} | {len(found)} | {sum(record.steps_to_goal is not None for record in found)} | "
                f"{'—' if steps == float('inf') else f'{steps:,.0f}'} | "
                f"{'—' if seconds == float('inf') else f'{seconds:.1f}'} | "
                f"{statistics.median(record.best_return for record in found):.2f} | "
                f"{f'{statistics.median(after):.2f} ({min(after):.2f})' if after else '—'} | "
                f"{statistics.median(record.seconds for record in found):.1f} s |"
            )
    lines += [
        "",
        "RecurrentPPO has an LSTM for the policy and another one for the value function, and their MLPs see nothing "
        "else. In freerun both share one cell, and see the observation too.",
        "All but the last two rows scale advantages to deviation 1 in every minibatch.",
        "All but the last row collect and learn in turns. " + others_beside(records),
    ]
    if not costs:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        "Processor time of one action in a worker, in microseconds (4 observations, 2 choices, two layers of 64):",
        "",
        f"| MLP | GRU of {MEMORY_SIZE} units and MLP | LSTM of {MEMORY_SIZE} units and MLP |",
        "| ---: | ---: | ---: |",
        f"| {costs['MLP']:.1f} | {costs['GRU']:.1f} ({costs['GRU'] / costs['MLP']:.1f} ×) | "
        f"{costs['LSTM']:.1f} ({costs['LSTM'] / costs['MLP']:.1f} ×) |",
    ]
    return "\n".join(lines) + "\n"


def write_reports(folder: Path, total_steps: int = Options.total_steps) -> str:
    file, costs = RunFile(folder / "memory_learning.json", MemoryRun), ResultFile(folder / ACTOR_COSTS, {})
    text = report(file.records, total_steps, costs.content)
    return write_report(folder / "memory_learning.md", text, file.stamped(), costs.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "memory_learning.json", MemoryRun)
    usable = [one for one in file.records if file.is_current(one) and (one.alone or not options.alone)]
    done = {(one.system, one.seed, one.total_steps) for one in usable}
    for seed in options.seeds:
        for system, train in SYSTEMS.items():
            if options.report_only or (system, seed, options.total_steps) in done:
                continue
            if train is train_recurrent_ppo and importlib.util.find_spec("sb3_contrib") is None:
                print(f"{system} is left out: it needs pip install sb3-contrib")
                continue
            record = summarised(system, seed, options.total_steps, train(seed, options.total_steps), options.alone)
            file.replace(record, "system", "seed", "total_steps")
            print(record, flush=True)
    if not options.report_only:
        costs = ResultFile(options.output / ACTOR_COSTS, {})
        costs.content = actor_costs()
        costs.save(*costs.content)
    print(write_reports(options.output, options.total_steps))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
