"""How well does PPO learn to defend: on NetworkDefence and, given --cyborg-path, on the real CybORG?

One run per environment and red agent, 100 steps an episode. Return: the mean of the last 100 training episodes, whose
actions are sampled; and, at the end, of 200 fresh episodes with the most likely actions.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from pictures import is_drawn, make_plots, save
from run_file import ResultFile, write_report

from freerun.run.evaluation import evaluate

SETTINGS = {
    "episodes-per-update": "40",
    "learning-rate": "0.002",
    "minibatch-size": "500",
    "num-epochs": "5",
    "envs-per-worker": "4",
}
FLAGS = ("--normalize-reward", "--anneal-learning-rate")
POINTS = 200
TICKS = (-1000, -500, -200, -100, -50, -20, -10)


@dataclass(frozen=True)
class Options:
    cyborg_path: Path | None = None
    """The folder that holds the real CybORG."""
    cyborg_commit: str = "26ce1c1"
    """Named with its scores."""
    red_agents: tuple[str, ...] = ("B_lineAgent", "RedMeanderAgent")
    """Who attacks."""
    total_episodes: int = 20_000
    """Of every run."""
    trial_episodes: int = 200
    """Of the last trial."""
    output: Path = Path(__file__).parent / "results" / "cyber_learning"
    """Folder for cyber_learning.json, .md and .png; runs that are in there are not made again."""
    report_only: bool = False
    """Write the report again, run nothing."""


def run(env: str, red_agent: str, options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        words = [sys.executable, "-m", "freerun", "train", env, "--red-agent", red_agent, "-q", *FLAGS]
        words += [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
        words += ["--total-episodes", str(options.total_episodes), "--run-dir", str(folder)]
        if env.startswith("cyborg"):
            words += ["--cyborg-path", str(options.cyborg_path)]
        subprocess.run(words, check=True)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        curve = [(int(line["episodes"]), line["return_mean"]) for line in lines[:: max(1, len(lines) // POINTS)]]
        trial = evaluate(folder, options.trial_episodes)
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "env": env,
        "red_agent": red_agent,
        "curve": [*curve, (int(lines[-1]["episodes"]), lines[-1]["return_mean"])],
        "trial_mean": statistics.mean(trial.returns),
        "trial_deviation": statistics.stdev(trial.returns),
        "wall_seconds": summary["wall_seconds"],
        "episodes_per_second": summary["episodes_per_second"],
    }


def markdown(records: list[dict[str, Any]], options: Options) -> str:
    lines = [
        "# PPO learns to defend",
        "",
        f"Episodes of 100 steps, seed 0; CybORG: commit {options.cyborg_commit}.",
        "Return: the mean of 100 training episodes after so many; in the end, of fresh episodes with the most likely",
        "actions (± their deviation). Written by `benchmarks/cyber_learning.py`. Runs shared the machine, so that",
        "episodes/s are no measure of speed.",
        "",
        "| environment | red agent | 1,000 | 5,000 | 10,000 | end of training | episodes | trial | episodes/s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        curve = record["curve"]
        marks = [next((f"{value:.1f}" for at, value in curve if at >= mark), "–") for mark in (1000, 5000, 10_000)]
        cells = [*marks, f"{curve[-1][1]:.1f}"]
        trial = f"{record['trial_mean']:.1f} ± {record['trial_deviation']:.1f}"
        cells += [f"{curve[-1][0]:,}", trial, f"{record['episodes_per_second']:.0f}"]
        lines.append(f"| {record['env']} | {record['red_agent']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(records: list[dict[str, Any]], path: Path) -> None:
    figure, (plot,) = make_plots(1, inches=(7, 4.4))
    for number, record in enumerate(records):
        label = f"{record['env'].rpartition('/')[2]}, {record['red_agent']}"
        plot.plot(*zip(*record["curve"], strict=True), color=f"C{number}", label=label)
    # Returns are negative and span three powers of ten, which a symmetric logarithm can show.
    plot.set(xlabel="episodes", ylabel="mean return of 100 episodes", yscale="symlog")
    plot.set_yticks(TICKS, [f"{tick:,}" for tick in TICKS], minor=False)
    save(figure, path)


def row_name(record: dict[str, Any]) -> str:
    return f"{record['env']}, {record['red_agent']}"


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "cyber_learning.json", [], lambda records: map(row_name, records))


def write_reports(folder: Path) -> str:
    file, picture = open_results(folder), folder / "cyber_learning.png"
    if not is_drawn(picture):
        draw(file.content, picture)
    return write_report(folder / "cyber_learning.md", markdown(file.content, Options()), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = open_results(options.output)
    envs = ["freerun/NetworkDefence-v0", *(["cyborg/CAGE2-v0"] if options.cyborg_path else [])]
    for env, red_agent in [(env, red) for env in reversed(envs) for red in options.red_agents]:
        name = row_name({"env": env, "red_agent": red_agent})
        if options.report_only or file.is_current(name):
            continue
        record = run(env, red_agent, options)
        file.content = [*(one for one in file.content if row_name(one) != name), record]
        file.save(name)
        print(env, red_agent, record["curve"][-1], record["trial_mean"], flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
