"""Does a memory help to defend a network? PPO on `freerun/NetworkDefence-v0` without and with `--memory gru`.

The same settings and the same steps for both, and the return of fresh episodes afterwards, with the most likely
actions. Finished runs are kept in memory_defence.json, so an interrupted benchmark continues.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from run_file import RunFile, versions

import freerun
from freerun.tools.bench.load_meter import processor

ENV = "freerun/NetworkDefence-v0"
MEMORIES = ("none", "gru")
SETTINGS: dict[str, Any] = {
    "num_workers": 1,
    "envs_per_worker": 16,
    "segment_steps": 128,
    "max_lag": 0,
    "steps_per_update": 2048,
    "minibatch_size": 256,
    "learning_rate": 6e-4,
}


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0, 1)
    red_agents: tuple[str, ...] = ("B_lineAgent", "RedMeanderAgent")
    total_steps: int = 150_000
    """Of every run."""
    episodes: int = 100
    """Fresh episodes after a run."""
    output: Path = Path(__file__).parent / "results" / "memory_defence"
    """Folder for memory_defence.json and .md."""
    report_only: bool = False
    """Write the report again, run nothing."""


@dataclass(frozen=True)
class DefenceRun:
    red_agent: str
    memory: str
    seed: int
    total_steps: int
    mean_return: float
    seconds: float


def train(red_agent: str, memory: str, seed: int, options: Options) -> DefenceRun:
    with tempfile.TemporaryDirectory() as scratch:
        own = {"red_agent": red_agent, "memory": memory, "seed": seed, "total_steps": options.total_steps}
        result = freerun.train(ENV, run_dir=Path(scratch) / "run", quiet=True, **own, **SETTINGS)
        score = freerun.evaluate(result.policy, episodes=options.episodes).mean
    return DefenceRun(red_agent, memory, seed, options.total_steps, score, result.summary["wall_seconds"])


def report(records: list[DefenceRun], options: Options) -> str:
    about = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# Defending a network with a memory",
        "",
        f"`benchmarks/memory_defence.py`: `{ENV}`, {options.total_steps:,} steps, "
        + ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
        + f". The return is the mean of {options.episodes} fresh episodes with the most likely actions; 0 is the best.",
        "",
        "| red agent | memory | seeds | return, each seed | median | seconds, median |",
        "| --- | --- | ---: | --- | ---: | ---: |",
    ]
    for red_agent in options.red_agents:
        for memory in MEMORIES:
            found = [one for one in records if (one.red_agent, one.memory) == (red_agent, memory)]
            found = [one for one in found if one.total_steps == options.total_steps]
            if found:
                returns = [one.mean_return for one in found]
                each = ", ".join(f"{value:.1f}" for value in returns)
                seconds = statistics.median(one.seconds for one in found)
                middle = statistics.median(returns)
                lines.append(f"| {red_agent} | {memory} | {len(found)} | {each} | {middle:.1f} | {seconds:.0f} |")
    lines += ["", "Others used the machine at the same time, so the seconds are rough.", f"{processor()}; {about}."]
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    file = RunFile(options.output / "memory_defence.json", DefenceRun)
    done = {(one.red_agent, one.memory, one.seed, one.total_steps) for one in file.records}
    for seed in options.seeds:
        for red_agent in options.red_agents:
            for memory in MEMORIES:
                if options.report_only or (red_agent, memory, seed, options.total_steps) in done:
                    continue
                file.records.append(train(red_agent, memory, seed, options))
                file.save()
                print(file.records[-1], flush=True)
    text = report(file.records, options)
    (options.output / "memory_defence.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
