"""Searches for settings: one `freerun sweep` beside the same study that starts `freerun train` for every trial.

All train the same trials on CartPole: the same learning rates, steps, epochs, minibatches and network, from Optuna's
queue and with Optuna's journal on the disk. `sb3` is the same study with Stable-Baselines3 in one process, as rl-zoo3
does it. The seconds are those of the whole study, from the start of its process to its end. Finished studies are kept
in the output folder: the same command goes on with those that it lacks, or that were run with other sources.
"""

from __future__ import annotations

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
from run_file import RunFile, versions, write_report

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
    repeats: int = 5
    """How often each study is run; the studies take turns."""
    time_limit: float = 3600.0
    """Begin no study after this many seconds."""
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


@dataclass(frozen=True)
class StudyRun:
    """A study that was run to its end."""

    study: str
    repeat: int
    trials: int
    total_steps: int
    seconds: float
    score: float
    """The mean of the scores of its trials."""
    cores: int | None
    versions: dict[str, str]


def measure(name: str, repeat: int, options: Options) -> StudyRun:
    """Run a study in a process of its own."""
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
    of_trials = (options.trials, options.total_steps, seconds, statistics.fmean(scores))
    return StudyRun(name, repeat, *of_trials, os.cpu_count(), versions())


def is_installed(name: str) -> bool:
    import importlib.util

    return name != "sb3" or importlib.util.find_spec("stable_baselines3") is not None


def main() -> None:
    options = tyro.cli(_OneStudy, description=__doc__)
    if options.study:
        print(json.dumps(STUDIES[options.study](options, options.folder)))
        return
    began = time.monotonic()
    file = RunFile(options.output / "sweeping.json", StudyRun)
    known = {(run.study, run.repeat) for run in chosen(file, options) if file.is_current(run)}
    studies = [name for name in options.studies if is_installed(name)]
    # Whoever comes first does not always come first.
    turns = [(name, turn) for turn in range(options.repeats) for name in studies[:: 1 if turn % 2 == 0 else -1]]
    for name, turn in [pair for pair in turns if pair not in known]:
        if time.monotonic() - began > options.time_limit:
            print("--time-limit is over: run it again for the others")
            break
        file.replace(measure(name, turn, options), "study", "repeat", "trials", "total_steps")
        print(f"{name}: {file.records[-1].seconds:.1f} s, mean score {file.records[-1].score:.1f}", flush=True)
    print(write_reports(options.output, options))


def write_reports(folder: Path, options: Options | None = None) -> str:
    options = options or Options()
    file = RunFile(folder / "sweeping.json", StudyRun)
    return write_report(folder / "sweeping.md", markdown(chosen(file, options), options), file.stamped())


def chosen(file: RunFile[StudyRun], options: Options) -> list[StudyRun]:
    """Return the runs of studies of this size, whichever studies are run now."""
    size = (options.trials, options.total_steps)
    return [run for run in file.records if (run.trials, run.total_steps) == size]


def markdown(runs: list[StudyRun], options: Options) -> str:
    by_study = {name: [run for run in runs if run.study == name] for name in STUDIES}
    middle = {name: statistics.median(run.seconds for run in found) for name, found in by_study.items() if found}
    lines = [
        "# A search for settings",
        "",
        f"{options.trials} trainings of {options.total_steps:,} steps each on {ENV} with {runs[-1].cores} cores, "
        "with the same learning rates in all studies; medians. `benchmarks/sweeping.py` wrote this.",
        "",
        "| study | runs | seconds | lowest–highest | × `freerun sweep` | mean score |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, median in middle.items():
        seconds = [run.seconds for run in by_study[name]]
        ratio = f"{median / middle['sweep']:.2f}" if "sweep" in middle else "–"
        score = statistics.fmean(run.score for run in by_study[name])
        spread = f"{min(seconds):.1f}–{max(seconds):.1f}"
        lines.append(f"| {NAMES[name]} | {len(seconds)} | {median:.1f} | {spread} | {ratio} | {score:.1f} |")
    lines += ["", f"Versions: {', '.join(f'{name} {version}' for name, version in runs[-1].versions.items())}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
