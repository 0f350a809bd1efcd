"""RoughDrone's hover task: how soon is it learned, by the clock and in real steps, by PPO, fast SAC and MBPO?

Learned is a return of 100 (of at most 150) in three episodes with the most likely actions. Every run is a process of
its own, one at a time; finished runs are kept in drone_learning.json, so an interrupted benchmark continues.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from pictures import make_plots, save

LEARNED = 100.0
COMMON = (
    *("freerun/RoughDrone-v0", "--env-args", "task", "hover", "--mode", "batch", "--acceleration", "graph"),
    *("--eval-episodes", "3", "--quiet"),
)
PPO = ("--algo", "ppo", "--num-epochs", "5", "--learning-rate", "1e-3", "--initial-log-std", "-0.5")
SYSTEMS: dict[str, tuple[str, ...]] = {
    "PPO, 4,096 drones": (
        *PPO,
        *("--num-envs", "4096", "--minibatch-size", "24576", "--hidden-sizes", "128", "128"),
        *("--total-steps", "8000000", "--eval-every", "400000"),
    ),
    "PPO, 512 drones": (
        *PPO,
        *("--num-envs", "512", "--minibatch-size", "3072", "--hidden-sizes", "64", "64"),
        *("--total-steps", "1500000", "--eval-every", "100000"),
    ),
    "fast SAC, 4,096 drones": (
        *("--algo", "fastsac", "--num-envs", "4096", "--total-steps", "4000000", "--eval-every", "200000"),
    ),
    "MBPO, 64 drones": (
        *("--preset", "mbpo-drone", "--eval-every", "3000", "--total-steps", "100000"),
        *("--hidden-sizes", "256", "256", "--batch-size", "256", "--learning-rate", "3e-4"),
        *("--model-hidden-sizes", "200", "200", "200", "200", "--model-updates-per-step", "1"),
    ),
    "MBPO, 64 drones, small networks": ("--preset", "mbpo-drone", "--eval-every", "2000"),
}


@dataclass(frozen=True)
class Options:
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """Who learns."""
    seeds: int = 3
    """Runs of each: seeds 0, 1, …"""
    jobs: int = 1
    """Runs at a time; with more than one, do not trust the seconds."""
    device: str = "auto"
    """Of simulator and learner."""
    output: Path = Path(__file__).parent / "results" / "drone_learning"
    """Folder for drone_learning.json, .md and .png."""
    report_only: bool = False
    """Write the report again, run nothing."""


def run_one(system: str, seed: int, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        flags = (*COMMON, *SYSTEMS[system], "--seed", str(seed), "--device", device, "--run-dir", str(run_dir))
        subprocess.run([sys.executable, "-m", "freerun", "train", *flags], check=True)
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        where = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["device"]
    curve: dict[int, tuple[float, float]] = {}
    for record in map(json.loads, lines):
        if "eval_step" in record:
            curve.setdefault(int(record["eval_step"]), (record["eval_return"], record["wall_seconds"]))
    return {
        "system": system,
        "seed": seed,
        "device": where,
        "curve": [(step, score, seconds) for step, (score, seconds) in sorted(curve.items())],
    }


def when_learned(record: dict[str, Any]) -> tuple[int, float] | None:
    """Steps and seconds."""
    return next(((step, seconds) for step, score, seconds in record["curve"] if score >= LEARNED), None)


def markdown(records: list[dict[str, Any]]) -> str:
    lines = [
        "# Learning to hover",
        "",
        f"Return of {LEARNED:g} in three episodes with the most likely actions: after how many real steps and seconds "
        "(with the trials). Medians (lowest – highest) over seeds; `benchmarks/drone_learning.py` wrote this.",
        "",
        "| | device | seeds | learned | real steps | seconds | return at the end |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for system in SYSTEMS:
        runs = [record for record in records if record["system"] == system]
        if not runs:
            continue
        found = [moment for record in runs if (moment := when_learned(record)) is not None]
        cells = [system, runs[0]["device"], str(len(runs)), str(len(found))]
        for part, digits in ((0, 0), (1, 1)):
            values = [moment[part] for moment in found]
            cells.append(
                f"{median(values):,.{digits}f} ({min(values):,.{digits}f} – {max(values):,.{digits}f})"
                if values
                else "–"
            )
        cells.append(f"{median(record['curve'][-1][1] for record in runs):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    notes = sorted({record["note"] for record in records if "note" in record})
    lines += ["", *(f"{note}." for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def draw(records: list[dict[str, Any]], path: Path) -> None:
    figure, (by_steps, by_seconds) = make_plots(2, sharey=True)
    for place, system in enumerate(SYSTEMS):
        for record in (record for record in records if record["system"] == system):
            steps, scores, seconds = zip(*record["curve"], strict=True)
            label = system if record["seed"] == 0 else None
            by_steps.plot(steps, scores, color=f"C{place}", alpha=0.8, label=label)
            by_seconds.plot(seconds, scores, color=f"C{place}", alpha=0.8)
    by_steps.set(xscale="log", xlabel="real steps", ylabel="return")
    by_seconds.set(xlabel="seconds")
    for plot in (by_steps, by_seconds):
        plot.axhline(LEARNED, color="grey", linewidth=0.8, linestyle=":")
    save(figure, path)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    path = options.output / "drone_learning.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = {(record["system"], record["seed"]) for record in records}
    options.output.mkdir(parents=True, exist_ok=True)
    seeds = range(0 if options.report_only else options.seeds)
    missing = [(system, seed) for seed in seeds for system in options.systems if (system, seed) not in found]
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run_one, system, seed, options.device) for system, seed in missing]):
            records.append(done.result())
            path.write_text(json.dumps(records), encoding="utf-8")
            print(
                records[-1]["system"], records[-1]["seed"], "(steps, seconds):", when_learned(records[-1]), flush=True
            )
    print(markdown(records))
    (options.output / "drone_learning.md").write_text(markdown(records), encoding="utf-8")
    draw(records, options.output / "drone_learning.png")


if __name__ == "__main__":
    main()
