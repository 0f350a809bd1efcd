"""What may keep 64 environments busy without learning less from the same steps?

A worker that hands over whole episodes may start one only as far as the lag allows: with 2,048 steps an update and a
lag of 1, a hundred workers are never all busy. Larger updates, segments and more lag each mend that. This trains PPO on
six tasks with 64 environments at once, with the defaults and with other settings, and compares what they learn from the
same number of steps: the mean return of 20 episodes with the final policy, and the mean return while it was trained.
Stable-Baselines3 with 64 environments tells what so many cost another PPO. Runs go on side by side, so their speed
means nothing here.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from run_file import ResultFile, write_report

ENVS_AT_ONCE = ("--num-workers", "4", "--envs-per-worker", "16")
TASKS = {
    "CartPole-v1": 150_000,
    "Acrobot-v1": 200_000,
    "LunarLander-v3": 400_000,
    "InvertedPendulum-v5": 150_000,
    "HalfCheetah-v5": 400_000,
    "Hopper-v5": 400_000,
}
"""The steps of a run."""
TASK_FLAGS = {"HalfCheetah-v5": ("--normalize-obs", "--normalize-reward"), "Hopper-v5": ("--normalize-obs",)}
NOT_NORMALIZED = ("--no-normalize-obs", "--no-normalize-reward")
SIZES_OF_ONE = ("--steps-per-update", "2048", "--minibatch-size", "64", "--learning-rate", "3e-4")
WAYS = {
    "as for one environment": (*SIZES_OF_ONE, "--segment-steps", "0", "--max-lag", "1", *NOT_NORMALIZED),
    "defaults": (),
    "advantages scaled": ("--normalize-advantage",),
    "segments of 32, lag 1": ("--segment-steps", "32", "--max-lag", "1"),
    "updates of 8,192": ("--steps-per-update", "8192"),
}
SB3 = "Stable-Baselines3"
"""Its own defaults, with 64 environments and 32 steps of each in an update."""
NUM_ENVS, STEPS_PER_ENV = 64, 32
NUM_EVALUATED = 20


@dataclass(frozen=True)
class Options:
    ways: tuple[str, ...] = (*WAYS, SB3)
    """What is compared; results of the others stay."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Environments; results of the others stay."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds of the runs."""
    at_once: int = max(1, (os.cpu_count() or 1) // 2)
    """Runs side by side."""
    output: Path = Path(__file__).parent / "results" / "default_sizes"


def learn(task: str, way: str, seed: int) -> dict[str, Any]:
    """Train, and return how well it went."""
    if way == SB3:
        command = [sys.executable, __file__, SB3, task, str(seed)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        final, trained = map(float, done.stdout.split()[-2:])
        return {"task": task, "way": way, "seed": seed, "final_return": final, "training_return": trained}
    folder = Path(tempfile.mkdtemp(prefix="default-sizes-"))
    run_dir = folder / "run"
    own = TASK_FLAGS.get(task, ())
    wanted = [flag for flag in WAYS[way] if flag.replace("--no-", "--") not in own]
    flags = (*ENVS_AT_ONCE, *wanted, *own, "--total-steps", str(TASKS[task]))
    flags = (*flags, "--seed", str(seed), "-q", "--checkpoint-every", "never", "--run-dir", str(run_dir))
    evaluate = f"import freerun; print(freerun.evaluate({str(run_dir)!r}, episodes={NUM_EVALUATED}).mean)"
    try:
        subprocess.run([sys.executable, "-m", "freerun", "train", task, *flags], check=True, capture_output=True)
        done = subprocess.run([sys.executable, "-c", evaluate], check=True, capture_output=True, text=True)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(folder)
    trained = statistics.mean(record["return_mean"] for record in records if record.get("return_mean") is not None)
    final = float(done.stdout.split()[-1])
    return {"task": task, "way": way, "seed": seed, "final_return": final, "training_return": trained}


def learn_by_sb3(task: str, seed: int) -> tuple[float, float]:
    """Return the mean return of the final policy, with its most likely actions, and the mean return while training."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    returns: list[float] = []

    class Returns(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            if self.model.ep_info_buffer:
                returns.append(statistics.mean(episode["r"] for episode in self.model.ep_info_buffer))

    flags = TASK_FLAGS.get(task, ())
    norm_obs, norm_reward = "--normalize-obs" in flags, "--normalize-reward" in flags
    envs = VecNormalize(make_vec_env(task, NUM_ENVS, seed=seed), norm_obs=norm_obs, norm_reward=norm_reward)
    model = PPO("MlpPolicy", envs, n_steps=STEPS_PER_ENV, seed=seed, device="cpu")
    model.learn(TASKS[task], callback=Returns())
    fresh = make_vec_env(task, 1, seed=seed + 1000)
    trials = VecNormalize(fresh, training=False, norm_obs=norm_obs, norm_reward=False)
    if norm_obs:
        trials.obs_rms = envs.obs_rms
    final, _ = evaluate_policy(model, trials, NUM_EVALUATED)
    assert isinstance(final, float)
    return final, statistics.mean(returns)


def markdown(results: list[dict[str, Any]]) -> str:
    ways = [way for way in (*WAYS, SB3) if any(result["way"] == way for result in results)]
    lines = [
        "64 environments at once, PPO's other defaults. "
        f"Mean return of {NUM_EVALUATED} episodes with the final policy: "
        "median (lowest – highest) over seeds; then the mean return during training, and the number of seeds. "
        "`benchmarks/default_sizes.py` wrote this.",
        "",
        "| task | steps | " + " | ".join(ways) + " |",
        "| --- | ---: |" + " ---: |" * len(ways),
    ]
    for task in TASKS:
        cells = []
        for way in ways:
            found = [result for result in results if (result["task"], result["way"]) == (task, way)]
            final, trained = ([result[name] for result in found] for name in ("final_return", "training_return"))
            spread = f"({min(final):,.0f} – {max(final):,.0f})" if final else ""
            cells.append(
                f"{statistics.median(final):,.0f} {spread}; {statistics.median(trained):,.0f}; {len(final)}"
                if final
                else ""
            )
        lines.append(f"| {task} | {TASKS[task]:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def row_name(result: dict[str, Any]) -> str:
    return f"{result['task']}, {result['way']}, seed {result['seed']}"


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "default_sizes.json", [], lambda results: map(row_name, results))


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "default_sizes.md", markdown(file.content), file.stamped())


def main() -> None:
    if sys.argv[1:2] == [SB3]:
        print(*learn_by_sb3(sys.argv[2], int(sys.argv[3])))
        return
    options = tyro.cli(Options, description=__doc__)
    file = open_results(options.output)
    jobs = [(task, way, seed) for seed in options.seeds for task in options.tasks for way in options.ways]
    with ThreadPoolExecutor(options.at_once) as pool:
        for result in pool.map(lambda job: learn(*job), jobs):
            name = row_name(result)
            file.content = [*(one for one in file.content if row_name(one) != name), result]
            file.save(name)  # after every run, so that a run of this script that is cut short has not been for nothing
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
