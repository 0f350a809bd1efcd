"""Does a memory help to defend a network? PPO without and with `--memory gru` on NetworkDefence, and on CybORG.

The same settings and the same steps for both, and the return of fresh episodes afterwards, with the most likely
actions. CybORG needs a copy of CAGE challenge 2: give its folder CybORG as --cyborg-path. Finished runs are kept in
memory_defence.json, so an interrupted benchmark continues.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from run_file import RunFile, write_report

import freerun

NETWORK_DEFENCE, CYBORG = "freerun/NetworkDefence-v0", "cyborg/CAGE2-v0"
MEMORIES = ("none", "gru")
SETTINGS: dict[str, Any] = {
    "segment_steps": 128,
    "max_lag": 0,
    "steps_per_update": 2048,
    "minibatch_size": 256,
    "learning_rate": 6e-4,
}
OF_ENV: dict[str, dict[str, Any]] = {
    NETWORK_DEFENCE: {"num_workers": 1, "envs_per_worker": 16},
    CYBORG: {"num_workers": 2, "envs_per_worker": 8},
}


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0, 1, 2)
    red_agents: tuple[str, ...] = ("B_lineAgent", "RedMeanderAgent")
    total_steps: int = 150_000
    """Of every run."""
    episodes: int = 100
    """Fresh episodes after a run."""
    cyborg_path: Path | None = None
    """The folder that holds the real CybORG, where that is to be learned instead of NetworkDefence."""
    cyborg_commit: str = "26ce1c1"
    """Of CAGE challenge 2, for the report."""
    memories: tuple[str, ...] = MEMORIES
    advantage_rows: Literal["minibatch", "update", "none"] | None = None
    """Over which rows advantages are scaled, or that they are not. (If not given: over minibatches without a memory,
    and not at all with one.)"""
    again: bool = False
    """Run what was run before, and replace it."""
    output: Path = Path(__file__).parent / "results" / "memory_defence"
    """Folder for memory_defence.json and .md."""
    report_only: bool = False
    """Write the report again, run nothing."""

    @property
    def env(self) -> str:
        return NETWORK_DEFENCE if self.cyborg_path is None else CYBORG


@dataclass(frozen=True)
class DefenceRun:
    env: str
    red_agent: str
    memory: str
    advantage_rows: str
    """Over which rows advantages were scaled: those of each minibatch, or of the update; `none` if they were not."""
    seed: int
    total_steps: int
    mean_return: float
    seconds: float

    @property
    def key(self) -> tuple[Any, ...]:
        return self.env, self.red_agent, self.total_steps, self.memory, self.advantage_rows, self.seed


def train(red_agent: str, memory: str, advantage_rows: str, seed: int, options: Options) -> DefenceRun:
    settings = {**SETTINGS, **OF_ENV[options.env], "red_agent": red_agent, "memory": memory, "seed": seed}
    settings["normalize_advantage"] = advantage_rows != "none"
    if advantage_rows != "none":
        settings["advantage_rows"] = advantage_rows
    if options.cyborg_path is not None:
        settings["cyborg_path"] = str(options.cyborg_path)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, steps = Path(scratch) / "run", options.total_steps
        result = freerun.train(options.env, run_dir=run_dir, quiet=True, total_steps=steps, **settings)
        score = freerun.evaluate(result.policy, episodes=options.episodes).mean
    seconds = result.summary["wall_seconds"]
    return DefenceRun(options.env, red_agent, memory, advantage_rows, seed, steps, score, seconds)


def report(records: list[DefenceRun], options: Options) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
    lines = [
        "# Defending a network with a memory",
        "",
        f"`benchmarks/memory_defence.py`: 16 environments, {settings}; all else by default. The return is the mean of "
        f"{options.episodes} fresh episodes of 100 steps with the most likely actions; 0 is the best. CybORG is "
        f"commit {options.cyborg_commit} of CAGE challenge 2.",
        "",
        "| environment | red agent | steps | memory | advantages scaled over | seeds | return, each seed | median | "
        "seconds, median |",
        "| --- | --- | ---: | --- | --- | ---: | --- | ---: | ---: |",
    ]
    records = sorted(records, key=lambda one: (*one.key[:3], MEMORIES.index(one.memory), *one.key[4:]))
    for kind in dict.fromkeys(one.key[:-1] for one in records):
        found = [one for one in records if one.key[:-1] == kind]
        env, red_agent, total_steps, memory, advantage_rows = kind
        returns = [one.mean_return for one in found]
        lines.append(
            f"| `{env}` | {red_agent} | {total_steps:,} | {memory} | {advantage_rows} | {len(found)} | "
            f"{', '.join(f'{value:.1f}' for value in returns)} | {statistics.median(returns):.1f} | "
            f"{statistics.median(one.seconds for one in found):.0f} |"
        )
    lines += ["", "Others used the machine at the same time, so the seconds are rough."]
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "memory_defence.json", DefenceRun)
    return write_report(folder / "memory_defence.md", report(file.records, Options()), file.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "memory_defence.json", DefenceRun)
    done = set() if options.again else {one.key for one in file.records}
    for seed in options.seeds:
        for red_agent in options.red_agents:
            for memory in options.memories:
                rows = options.advantage_rows or ("minibatch" if memory == "none" else "none")
                key = (options.env, red_agent, options.total_steps, memory, rows, seed)
                if options.report_only or key in done:
                    continue
                file.replace(train(red_agent, memory, rows, seed, options), "key")
                print(file.records[-1], flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
