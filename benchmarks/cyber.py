"""Episodes per second of every mode on cyber-defence environments, as a share of what the machine can do.

The limit is the same environments stepped with random actions and nothing else, one process per core. It is measured
before and after every run, and each run is compared with its two neighbours: a shared machine is not equally fast all
the time. Every mode is measured twice: with a learner that takes 100 episodes at a time and learns nothing, and with
PPO. The environments keep the cores busy, so what PPO computes is lost to them. Modes run interleaved and repeated;
medians count.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from freerun.benching import bare
from freerun.completing import complete
from freerun.core import Metrics, Start
from freerun.envs.gymnasium import GymnasiumFactory
from freerun.making import make_factory
from freerun.pool import Pool
from freerun.registry import ALGORITHMS, MODES, make_config
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.training import train

SAMPLE_SECONDS = 0.1
WINDOW_SECONDS = 1.0
FULL_SPEED = 0.9


@dataclass(frozen=True)
class Options:
    env: str = "freerun/NetworkDefence-v0"
    """freerun/NetworkDefence-v0, or cyborg/CAGE2-v0 with --cyborg-path."""
    cyborg_path: Path | None = None
    """The folder that holds the real CybORG."""
    modes: tuple[str, ...] = tuple(mode for mode in MODES if MODES[mode].whole_episodes)
    """Ways of collecting."""
    num_workers: int = os.cpu_count() or 1
    """Worker processes: the environment keeps a core busy."""
    envs_per_worker: int = 1
    """Of mode `freerun`: environments that share a call of the policy."""
    num_epochs: int = 4
    """Of every PPO update."""
    seconds: float = 8.0
    """Length of a run, about."""
    repeats: int = 3
    """Runs of each."""
    output: Path = Path(__file__).parent / "results" / "cyber"
    """Folder for cyber-….json and cyber-….md."""

    @property
    def env_args(self) -> dict[str, Any]:
        return {} if self.cyborg_path is None else {"cyborg_path": str(self.cyborg_path)}


def bare_limit(options: Options) -> float:
    """Episodes per second of all cores at once."""
    factory = GymnasiumFactory(options.env, options.env_args)
    return bare.measure(factory, os.cpu_count() or 1, options.seconds / 2)["episodes_per_second"]


class Onlooker:
    """Demands what PPO demands, and learns nothing."""

    def __init__(self, algorithm: Any):
        self._algorithm = algorithm
        self.policy, self.demand = algorithm.policy, algorithm.demand
        self.observe, self.state_dict = algorithm.observe, algorithm.state_dict
        self.load_state_dict = algorithm.load_state_dict

    def update(self, version: int, progress: float) -> Metrics:
        self._algorithm._segments, self._algorithm._sizes = [], []
        return {}


def measure(options: Options, mode: str, total_episodes: int, training: bool) -> dict[str, float]:
    """Rate once warm, and the seconds from nothing to full speed."""
    settings: dict[str, Any] = {"env": options.env, "mode": mode, "total_episodes": total_episodes, "quiet": True}
    settings |= {"episodes_per_update": 100, "num_epochs": options.num_epochs, "minibatch_size": 2000}
    settings |= {"num_workers": 1 if mode == "sequential" else options.num_workers, "env_args": options.env_args}
    if mode == "freerun":
        settings["envs_per_worker"] = options.envs_per_worker
    config = complete(make_config(settings))
    pool = Pool(make_factory(config))
    algorithm = ALGORITHMS[config.algo].load()(pool.factory.spec, config.algorithm, 0, "cpu", False)
    if not training:
        algorithm = Onlooker(algorithm)
    torch.set_num_threads(1)
    began = time.perf_counter()
    collector = pool.collector(config, algorithm, Start())
    samples: list[tuple[float, int]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            samples.append((time.perf_counter() - began, collector.counts().episodes_delivered))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        train(algorithm, collector, Budget(None, total_episodes), Ledger(), [])
    finally:
        done.set()
        thread.join()
        pool.close()
    return figures(samples)


def figures(samples: list[tuple[float, int]]) -> dict[str, float]:
    """Warm: from a quarter of the episodes on. Full speed: the first second in which 90 % of that rate was reached."""
    total = samples[-1][1]
    first = next(index for index, (_, episodes) in enumerate(samples) if episodes >= total / 4)
    (start, before), (end, after) = samples[first], samples[-1]
    rate = (after - before) / (end - start)
    width = round(WINDOW_SECONDS / SAMPLE_SECONDS)
    reached = end
    for early, late in zip(samples, samples[width:], strict=False):
        if (late[1] - early[1]) / (late[0] - early[0]) >= FULL_SPEED * rate:
            reached = early[0]
            break
    return {"episodes_per_second": rate, "seconds_to_full_speed": reached}


def run_all(options: Options) -> dict[str, Any]:
    limit = bare_limit(options)
    print(f"bare: {limit:.1f} episodes/s on {os.cpu_count()} cores", flush=True)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        mode: {"collecting": [], "training": []} for mode in options.modes
    }
    limits = [limit]
    for _ in range(options.repeats):
        for mode in options.modes:
            share = 1 / (os.cpu_count() or 1) if mode == "sequential" else 1.0
            episodes = max(300, round(limit * share * options.seconds / 100) * 100)
            for kind, found in runs[mode].items():
                run = measure(options, mode, episodes, training=kind == "training")
                limits.append(bare_limit(options))
                found.append({**run, "of_limit": run["episodes_per_second"] / statistics.mean(limits[-2:])})
                print(mode, kind, {name: round(value, 2) for name, value in found[-1].items()}, flush=True)
    return {
        "env": options.env,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "num_workers": options.num_workers,
        "envs_per_worker": options.envs_per_worker,
        "num_epochs": options.num_epochs,
        "bare": limits,
        "modes": runs,
    }


def markdown(results: dict[str, Any]) -> str:
    limit = statistics.median(results["bare"])
    lines = [
        f"# Episodes per second on {results['env']}",
        "",
        f"{results['machine']}; {results['num_workers']} workers (sequential: 1), of `freerun` with "
        f"{results['envs_per_worker']} environments each. Bare limit: {limit:,.1f} episodes/s "
        f"({min(results['bare']):,.1f} – {max(results['bare']):,.1f}).",
        f"PPO: 100 episodes an update, {results['num_epochs']} epochs. Medians (lowest – highest) of interleaved runs;",
        "`benchmarks/cyber.py` wrote this.",
        "",
        "| mode | collecting, episodes/s | of limit | training, episodes/s | of limit | seconds to full speed |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, runs in results["modes"].items():
        cells = []
        for found in runs.values():
            rates = [run["episodes_per_second"] for run in found]
            rate = statistics.median(rates)
            shares = [run["of_limit"] for run in found]
            cells.append(f"{rate:,.1f} ({min(rates):,.1f} – {max(rates):,.1f})")
            cells.append(f"{statistics.median(shares):.0%} ({min(shares):.0%} – {max(shares):.0%})")
        starts = [run["seconds_to_full_speed"] for run in runs["collecting"]]
        lines.append(f"| `{mode}` | {' | '.join(cells)} | {statistics.median(starts):.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    results = run_all(options)
    print(markdown(results))
    options.output.mkdir(parents=True, exist_ok=True)
    name = "cyber-" + options.env.rpartition("/")[2].lower()
    (options.output / f"{name}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    (options.output / f"{name}.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
