"""Scores and speed of NetworkDefence, beside those of CybORG where it is at hand (--cyborg-path).

Three defenders that look only at the 52 bits play the same number of steps in both. Returns after 30 and 50 steps are
the first part of the same episodes: nothing in them depends on when they end.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from network_defence_cyborg import DiceReport, Simulator, replay
from numpy.typing import NDArray
from run_file import ResultFile, write_report

from freerun_envs.defenders import DEFENDERS
from freerun_envs.network_actions import ACTION_NAMES
from freerun_envs.network_defence import NetworkDefenceVector
from freerun_envs.single_network import NetworkDefence

RED_AGENTS = ("B_lineAgent", "RedMeanderAgent")
HORIZONS = (30, 50, 100)
NUM_STEPS = max(HORIZONS)
MANY = 4096
SPEED_SECONDS = 3.0

Actions = NDArray[np.int64]


@dataclass(frozen=True)
class Options:
    episodes: int = 4096
    """Of NetworkDefence, for each defender and red agent."""
    cyborg_path: Path | None = None
    """Folder that holds the package CybORG; what it needs (pyyaml, prettytable, paramiko) must be importable."""
    cyborg_commit: str = "26ce1c1"
    """Named with its scores."""
    cyborg_episodes: int = 300
    """Of CybORG, for each defender and red agent; about half a second each."""
    replay_episodes: int = 50
    """Of CybORG for each red agent, played again in NetworkDefence with CybORG's random outcomes."""
    processes: int = 2
    """For CybORG."""
    output: Path = Path(__file__).parent / "results" / "network_defence"
    """Folder for network_defence.json and network_defence.md."""


# ---------------------------------------------------------------------------------------------- scores


def drawn_actions(num_episodes: int) -> Actions:
    """The same for episode k of both simulators, [step, episode]."""
    draws = [np.random.default_rng((k, 1)).integers(len(ACTION_NAMES), size=NUM_STEPS) for k in range(num_episodes)]
    return np.stack(draws, axis=1)


def play(defender: str, red_agent: str, num_episodes: int) -> NDArray[np.float64]:
    """Rewards in NetworkDefence, [step, episode]."""
    networks = NetworkDefenceVector(num_episodes, red_agent, NUM_STEPS)
    obs = networks.reset(range(num_episodes))
    rewards = []
    for drawn in drawn_actions(num_episodes):
        obs, _, reward, _, _ = networks.step(DEFENDERS[defender](obs, drawn))
        rewards.append(reward)
    return np.array(rewards)


def play_cyborg(path: Path, defender: str, red_agent: str, num_episodes: int) -> NDArray[np.float64]:
    simulator = Simulator(path, red_agent)
    drawn = drawn_actions(num_episodes)
    rewards = np.zeros((NUM_STEPS, num_episodes))
    for episode in range(num_episodes):
        obs = simulator.reset(seed=episode)
        for step in range(NUM_STEPS):
            action = DEFENDERS[defender](obs[None], drawn[step, episode : episode + 1])
            obs, rewards[step, episode] = simulator.step(int(action[0]))
    return rewards


def summary(rewards: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    returns = {horizon: rewards[:horizon].sum(axis=0) for horizon in HORIZONS}
    return {
        str(horizon): {"mean": float(found.mean()), "standard_error": float(found.std() / np.sqrt(found.size))}
        for horizon, found in returns.items()
    }


# ---------------------------------------------------------------------------------------------- speed


def steps_per_second(red_agent: str) -> dict[str, float]:
    """By the processor's time, one core, uniformly random actions, resets included."""
    drawn = drawn_actions(MANY)
    env, networks = NetworkDefence(red_agent), NetworkDefenceVector(MANY, red_agent)

    def one() -> int:
        env.reset(seed=0)
        for action in drawn[:, 0]:
            env.step(action)
        return NUM_STEPS

    def many() -> int:
        networks.reset(range(MANY))
        for actions in drawn:
            networks.step(actions)
        return NUM_STEPS * MANY

    return {"1": _rate(one), str(MANY): _rate(many)}


def _rate(run: Callable[[], int]) -> float:
    """The best of several runs: noise only adds."""
    run()
    started, best = time.process_time(), 0.0
    while time.process_time() - started < SPEED_SECONDS:
        before = time.process_time()
        num_steps = run()
        best = max(best, num_steps / (time.process_time() - before))
    return best


# ---------------------------------------------------------------------------------------------- report


def measure(options: Options) -> dict[str, Any]:
    cases = [(defender, red_agent) for red_agent in RED_AGENTS for defender in DEFENDERS]
    rows = [
        {
            "red_agent": red_agent,
            "defender": defender,
            "freerun": summary(play(defender, red_agent, options.episodes)),
        }
        for defender, red_agent in cases
    ]
    report: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
        "episodes": options.episodes,
        "scores": rows,
        "steps_per_second": {red_agent: steps_per_second(red_agent) for red_agent in RED_AGENTS},
    }
    path = options.cyborg_path
    if path is None:
        return report
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        played = [pool.submit(play_cyborg, path, *case, options.cyborg_episodes) for case in cases]
        dice = [pool.submit(replay, path, red_agent, options.replay_episodes) for red_agent in RED_AGENTS]
        for row, future in zip(rows, played, strict=True):
            row["cyborg"] = summary(future.result())
            print(row, flush=True)
        reports: list[DiceReport] = [future.result() for future in dice]
    report["cyborg"] = {
        "commit": options.cyborg_commit,
        "episodes": options.cyborg_episodes,
        "replayed_steps": sum(found.num_steps for found in reports),
        "equal_steps": sum(found.num_equal for found in reports),
    }
    return report


def table(report: dict[str, Any]) -> str:
    cyborg = report.get("cyborg")
    beside = (
        f", {cyborg['episodes']} of CybORG (CAGE challenge 2, commit {cyborg['commit']}): mean ± standard error, and "
        "by how much NetworkDefence's loss is the larger"
        if cyborg
        else ": mean ± standard error"
    )
    lines = [
        f"Returns over {report['episodes']:,} episodes of NetworkDefence{beside}.",
        "",
        "| red agent | defender | steps | NetworkDefence | CybORG | difference |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in report["scores"]:
        for horizon in map(str, HORIZONS):
            ours, theirs = row["freerun"][horizon], row.get("cyborg", {}).get(horizon)
            difference = f"{100 * (ours['mean'] / theirs['mean'] - 1):+.1f} %" if theirs else ""
            lines.append(
                f"| {row['red_agent']} | {row['defender']} | {horizon} | {_score(ours)} | "
                f"{_score(theirs) if theirs else ''} | {difference} |"
            )
    if cyborg:
        lines += [
            "",
            f"With CybORG's random outcomes (which host, which service, noticed or not) and the same actions, "
            f"{cyborg['equal_steps']:,} of {cyborg['replayed_steps']:,} steps of NetworkDefence were equal to CybORG's "
            "in every bit of the observation, the reward, red's true access to each host and blue's success.",
        ]
    lines += [
        "",
        f"Steps per second on one of {report['machine']['cores']} cores, random actions, resets included:",
        "",
        f"| red agent | 1 network | {MANY:,} networks |",
        "| --- | ---: | ---: |",
        *(
            f"| {red_agent} | {rates['1']:,.0f} | {rates[str(MANY)]:,.0f} |"
            for red_agent, rates in report["steps_per_second"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _score(found: dict[str, float]) -> str:
    return f"{found['mean']:.1f} ± {found['standard_error']:.1f}"


def open_results(folder: Path) -> ResultFile:
    def rows(report: dict[str, Any]) -> list[str]:
        ours = [f"{row['red_agent']}, {row['defender']}" for row in report["scores"]]
        return [*ours, *(["CybORG"] if "cyborg" in report else [])]

    return ResultFile(folder / "network_defence.json", {}, rows)


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "network_defence.md", table(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    report, file = measure(options), open_results(options.output)
    measured = {f"{row['red_agent']}, {row['defender']}" for row in report["scores"]}
    if "cyborg" not in report and "cyborg" in file.content:
        theirs = {(row["red_agent"], row["defender"]): row.get("cyborg") for row in file.content["scores"]}
        report["cyborg"] = file.content["cyborg"]
        for row in report["scores"]:
            row["cyborg"] = theirs[row["red_agent"], row["defender"]]
    else:
        measured.add("CybORG")
    file.content = report
    file.save(*measured)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
