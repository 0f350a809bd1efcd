"""Searches for settings: one `freerun sweep` beside the same study that starts `freerun train` for every trial.

All train the same trials on CartPole: the same learning rates, steps, epochs, minibatches and network, from Optuna's
queue and with Optuna's journal on the disk. `sb3` is the same study with Stable-Baselines3 in one process, as rl-zoo3
does it. The seconds are those of the whole study, from the start of its process to its end.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
from run_file import versions

ENV = "CartPole-v1"
STEPS_PER_UPDATE, NUM_EPOCHS, MINIBATCH_SIZE, HIDDEN_SIZES = 512, 4, 64, (64, 64)
NUM_WORKERS = 2
RATES = (1e-4, 1e-2)
"""The ends of the learning rates, which are evenly spaced on a logarithmic scale."""


@dataclass(frozen=True)
class Options:
    trials: int = 30
    """Trainings of each study."""
    total_steps: int = 5000
    """Steps of each training."""
    repeats: int = 3
    """How often each study is run; the studies take turns."""
    studies: tuple[str, ...] = ("sweep", "train", "sb3")
    """Which studies to run. sb3 is left out if Stable-Baselines3 is not installed."""
    output: Path = Path(__file__).parent / "results" / "sweeping"


def rates(options: Options) -> list[float]:
    low, high = map(math.log, RATES)
    count = max(1, options.trials - 1)
    return [float(f"{math.exp(low + (high - low) * place / count):.6g}") for place in range(options.trials)]


def flags(options: Options) -> list[str]:
    words = [ENV, "--total-steps", str(options.total_steps), "--num-workers", str(NUM_WORKERS), "--quiet"]
    words += ["--steps-per-update", str(STEPS_PER_UPDATE), "--num-epochs", str(NUM_EPOCHS)]
    return [*words, "--minibatch-size", str(MINIBATCH_SIZE), "--hidden-sizes", *map(str, HIDDEN_SIZES)]


def sweep(options: Options, folder: Path) -> list[float]:
    """Run `freerun sweep` and return the scores."""
    command = [sys.executable, "-m", "freerun", "sweep", *flags(options), "--run-dir", str(folder)]
    command += ["--sampler", "grid", "--no-prune", "--vary", "learning-rate", *map(str, rates(options))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [trial["score"] for trial in json.loads((folder / "trials.json").read_text(encoding="utf-8"))["trials"]]


def study_by_processes(options: Options, folder: Path) -> list[float]:
    """The study whose objective starts `freerun train`."""

    def objective(number: int, rate: float) -> float:
        run_dir = folder / f"trial-{number}"
        command = [sys.executable, "-m", "freerun", "train", *flags(options), "--learning-rate", str(rate)]
        subprocess.run([*command, "--run-dir", str(run_dir)], check=True, stdout=subprocess.DEVNULL)
        return float(json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["mean_return"])

    return study(options, folder, objective)


def study_with_sb3(options: Options, folder: Path) -> list[float]:
    """The study whose objective trains Stable-Baselines3's PPO in this process, as rl-zoo3's does."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)  # what is fastest for networks of this size

    def objective(number: int, rate: float) -> float:
        env = make_vec_env(ENV, NUM_WORKERS)
        model = PPO(
            "MlpPolicy",
            env,
            rate,
            n_steps=STEPS_PER_UPDATE // NUM_WORKERS,
            batch_size=MINIBATCH_SIZE,
            n_epochs=NUM_EPOCHS,
            policy_kwargs={"net_arch": list(HIDDEN_SIZES)},
            seed=0,
            device="cpu",
        )
        model.learn(options.total_steps)
        env.close()
        return statistics.fmean(episode["r"] for episode in model.ep_info_buffer or [])

    return study(options, folder, objective)


def study(options: Options, folder: Path, objective: Callable[[int, float], float]) -> list[float]:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True)
    storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
    found = optuna.create_study(storage=storage, direction="maximize", sampler=optuna.samplers.RandomSampler(0))
    for rate in rates(options):
        found.enqueue_trial({"learning_rate": rate})
    found.optimize(
        lambda trial: objective(trial.number, trial.suggest_float("learning_rate", *RATES, log=True)),
        n_trials=options.trials,
    )
    return [trial.values[0] for trial in found.trials]


STUDIES = {"sweep": sweep, "train": study_by_processes, "sb3": study_with_sb3}
NAMES = {
    "sweep": "`freerun sweep`",
    "train": "Optuna, `freerun train` for each trial",
    "sb3": "Optuna, Stable-Baselines3 in one process",
}


@dataclass(frozen=True)
class _OneStudy(Options):
    """What a process of this script is started with to run one study, so that its imports count."""

    study: str = ""
    folder: Path = Path()


def measure(name: str, options: Options) -> tuple[float, float]:
    """Run a study in a process of its own; return its seconds and the mean of its scores."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "study"
        script = str(Path(__file__).resolve())
        words = ["--trials", str(options.trials), "--total-steps", str(options.total_steps)]
        command = [sys.executable, script, *words, "--study", name, "--folder", str(folder)]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - began
    scores = json.loads(done.stdout.splitlines()[-1])
    assert len(scores) == options.trials
    return seconds, statistics.fmean(scores)


def is_installed(name: str) -> bool:
    import importlib.util

    return name != "sb3" or importlib.util.find_spec("stable_baselines3") is not None


def main() -> None:
    options = tyro.cli(_OneStudy, description=__doc__)
    if options.study:
        print(json.dumps(STUDIES[options.study](options, options.folder)))
        return
    studies = [name for name in options.studies if is_installed(name)]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in studies}
    for repeat in range(options.repeats):
        for name in studies[:: 1 if repeat % 2 == 0 else -1]:  # whoever comes first does not always come first
            results[name].append(measure(name, options))
            print(f"{name}: {results[name][-1][0]:.1f} s, mean score {results[name][-1][1]:.1f}", flush=True)
    write(options, results)


def write(options: Options, results: dict[str, list[tuple[float, float]]]) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    own = {field.name: getattr(options, field.name) for field in dataclasses.fields(Options)}
    own = {name: value for name, value in own.items() if name != "output"}
    content = {"options": own, "cores": os.cpu_count(), "versions": versions(), "seconds_and_scores": results}
    (options.output / "sweeping.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    middle = {name: statistics.median(seconds for seconds, _ in runs) for name, runs in results.items()}
    lines = [
        "# A search for settings",
        "",
        f"{options.trials} trainings of {options.total_steps:,} steps each on {ENV} with {os.cpu_count()} cores, "
        f"with the same learning rates in all studies; medians of {options.repeats}. "
        "`benchmarks/sweeping.py` wrote this.",
        "",
        "| study | seconds | lowest–highest | × `freerun sweep` | mean score |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in results.items():
        seconds = [second for second, _ in runs]
        ratio = f"{middle[name] / middle['sweep']:.2f}" if "sweep" in middle else "–"
        score = statistics.fmean(score for _, score in runs)
        spread = f"{min(seconds):.1f}–{max(seconds):.1f}"
        lines.append(f"| {NAMES[name]} | {middle[name]:.1f} | {spread} | {ratio} | {score:.1f} |")
    (options.output / "sweeping.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
