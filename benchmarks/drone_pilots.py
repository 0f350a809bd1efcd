"""RoughDrone's tasks flown by scripted pilots, beside the most that any policy could get: what is a good return?

The pilots and the argument for the upper bounds are in src/freerun_envs/drone_pilots.py. Each pilot flies one episode
with each of many drones. Of a pilot with a speed, several speeds are tried, and the table has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from run_file import ResultFile, write_report

from freerun_envs.drone_pilots import HoverPilot, LawnMower, Pilot, RandomPilot, WaypointPilot, fly, most_return
from freerun_envs.drone_sim import RoughDroneSim

TASKS = (("hover", 1), ("waypoint", 1), ("explore", 0), ("explore", 1))
"""Tasks and versions. Versions 0 and 1 of `hover` and `waypoint` are the same."""
SPEEDS = (4.0, 5.0, 6.0, 8.0, 10.0, 15.0)
"""In m/s."""


@dataclass(frozen=True)
class Options:
    episodes: int = 256
    """Of each pilot in each task."""
    seed: int = 1000
    """Of the episodes."""
    output: Path = Path(__file__).parent / "results" / "drone_pilots"
    """Folder for drone_pilots.json and drone_pilots.md."""


def pilots(task: str, seed: int) -> dict[str, Callable[[RoughDroneSim], Pilot]]:
    found: dict[str, Callable[[RoughDroneSim], Pilot]] = {
        "random": partial(RandomPilot, seed=seed),
        "hover in place": HoverPilot,
    }
    for speed in SPEEDS:
        if task == "waypoint":
            found[f"straight to the goal, {speed:g} m/s"] = partial(WaypointPilot, speed=speed)
        if task == "explore":
            found[f"lawn-mower, {speed:g} m/s"] = partial(LawnMower, speed=speed)
    return found


def measure(task: str, version: int, options: Options) -> dict[str, Any]:
    rows = []
    for name, make in pilots(task, options.seed).items():
        sim = RoughDroneSim(options.episodes, task=task, seed=options.seed, autoreset=False, version=version)
        bound = most_return(sim)
        flights = fly(sim, make(sim))
        rows.append(
            {
                "pilot": name,
                "mean": float(flights.returns.mean()),
                "deviation": float(flights.returns.std()),
                "steps": float(flights.num_steps.mean()),
                "crashed": float(flights.crashed.float().mean()),
                "seen": float(flights.seen_share.mean()) if task == "explore" else None,
            }
        )
        print(task, f"v{version}", rows[-1], flush=True)
    return {"task": task, "version": version, "episodes": options.episodes, "most": bound, "pilots": rows}


def markdown(tables: list[dict[str, Any]]) -> str:
    lines = [
        "# RoughDrone flown by scripted pilots",
        "",
        f"Mean return and standard deviation over {tables[0]['episodes']} episodes, by `benchmarks/drone_pilots.py`. "
        "The most is an upper bound that no policy can reach: `drone_pilots.most_return` argues for it.",
        "",
        "| task | pilot | return | of the most | crashed | seen |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for table in tables:
        name = f"{table['task']}, v{table['version']}" if table["task"] == "explore" else table["task"]
        lines.append(f"| **{name}** | the most | {table['most']:.1f} | 100 % | | |")
        for row in table["pilots"]:
            seen = "" if row["seen"] is None else f"{row['seen']:.0%}"
            cells = [name, row["pilot"], f"{row['mean']:.1f} ± {row['deviation']:.1f}"]
            cells += [f"{row['mean'] / table['most']:.0%}", f"{row['crashed']:.0%}", seen]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("%", " %").replace("  %", " %") + "\n"


def open_results(folder: Path) -> ResultFile:
    def rows(tables: list[dict[str, Any]]) -> list[str]:
        return [f"{table['task']}, v{table['version']}" for table in tables]

    return ResultFile(folder / "drone_pilots.json", [], rows)


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "drone_pilots.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    file = open_results(options.output)
    file.content = [measure(task, version, options) for task, version in TASKS]
    file.save(*(row for row, _ in file.stamped()))
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
