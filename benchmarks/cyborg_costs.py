"""Processor time of CybORG's CAGE 2 game: through its own ChallengeWrapper, and through freerun's adapter.

Episodes of 100 random actions, the same ones for both, taken in turns; the results are compared on the way.
"""

from __future__ import annotations

import importlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tyro
from run_file import ResultFile, write_report

from freerun.adapters import cyborg

NUM_STEPS = 100
COLUMNS = ("construct", "reset", "step", "host_status")
Result = TypeVar("Result")
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Options:
    cyborg_path: Path
    """The folder CybORG of a clone of cage-challenge/cage-challenge-2."""
    episodes: int = 30
    """Of each red agent."""
    output: Path = Path(__file__).parent / "results" / "cyborg_costs"
    """Folder for cyborg_costs.json and cyborg_costs.md."""


def timed(times: Times, what: str, work: Callable[[], Result]) -> Result:
    started = time.process_time()
    result = work()
    times.setdefault(what, []).append(time.process_time() - started)
    return result


def challenge(red_agent: str) -> tuple[Any, Any]:
    simulation = sys.modules["CybORG"].CybORG(
        str(sys.modules[cyborg.FAST].SCENARIO),
        "sim",
        agents={"Red": getattr(sys.modules["CybORG.Agents"], red_agent)},
    )
    wrappers = importlib.import_module("CybORG.Agents.Wrappers")
    return simulation, wrappers.ChallengeWrapper(env=simulation, agent_name="Blue", max_steps=NUM_STEPS)


def compare(red_agent: str, options: Options) -> dict[str, Times]:
    theirs: Times = {}
    ours: Times = {}
    for _ in range(5):
        env = timed(ours, "construct", lambda: cyborg.CAGE2(red_agent, NUM_STEPS, options.cyborg_path))
        simulation, wrapper = timed(theirs, "construct", lambda: challenge(red_agent))
    del ours["construct"][0]  # it loads CybORG
    rng = random.Random(0)
    for seed in range(options.episodes):
        actions = [np.int64(rng.randrange(cyborg.NUM_ACTIONS)) for _ in range(NUM_STEPS)]
        simulation.set_seed(seed)
        first = timed(theirs, "reset", wrapper.reset)
        assert (first == timed(ours, "reset", lambda seed=seed: env.reset(seed=seed))[0]).all()  # type: ignore[misc]
        expected = [timed(theirs, "step", lambda action=action: wrapper.step(action)) for action in actions]  # type: ignore[misc]
        for action, (obs, reward, done, _) in zip(actions, expected, strict=True):
            found = timed(ours, "step", lambda action=action: env.step(action))  # type: ignore[misc]
            assert (obs == found[0]).all()
            assert (reward, done) == (found[1], found[3])
            timed(ours, "host_status", env.host_status)
    return {"ChallengeWrapper": theirs, "freerun": ours}


def table(report: dict[str, Any]) -> str:
    lines = [
        f"Processor time in µs, medians (of steps the mean); {report['episodes']} episodes of {NUM_STEPS} random "
        f"actions each; Python {report['python']}. An episode is a reset and {NUM_STEPS} steps.",
        "",
        "| red agent | through | construct | reset | step | host_status | episodes per core-second |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for red_agent, both in report["red_agents"].items():
        for name, costs in both.items():
            numbers = [f"{1e6 * costs[it]:,.0f}" if it in costs else "" for it in COLUMNS]
            per_second = 1 / (costs["reset"] + NUM_STEPS * costs["step"])
            lines.append(f"| {red_agent} | {name} | {' | '.join(numbers)} | {per_second:.1f} |")
    return "\n".join(lines) + "\n"


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "cyborg_costs.json", {}, lambda content: content["red_agents"])


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "cyborg_costs.md", table(file.content), file.stamped())


def main(options: Options) -> None:
    agents: dict[str, Any] = {}
    for red_agent in cyborg.RED_AGENTS:
        both = compare(red_agent, options)
        agents[red_agent] = {
            name: {what: (statistics.mean if what == "step" else statistics.median)(it) for what, it in times.items()}
            for name, times in both.items()
        }
    file = open_results(options.output)
    file.content = {"python": platform.python_version(), "episodes": options.episodes, "red_agents": agents}
    file.save(*agents)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
