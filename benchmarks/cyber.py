"""Episodes per second of every mode on cyber-defence environments, as a share of what the machine can do.

The limit is the same environments stepped with random actions and nothing else, one process per core. A shared machine
is not equally fast from one second to the next, so the two take turns: after every update all processes of the run are
stopped for a moment, and those of the limit go on; each stretch of the run is compared with its two neighbours. Every
mode is measured in three ways: with a learner that takes 100 episodes at a time and learns nothing, with PPO, and with
PPO at a learning rate of practically zero. The environments keep the cores busy, so what PPO computes is lost to them.
The third way tells this from something else: what a policy learns to do may take the simulator longer than the random
actions of the limit do. Modes run interleaved and repeated; medians count.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import tyro
from run_file import ResultFile, merge, write_report

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import Collector, Metrics, StartPoint
from freerun.run.pool import Pool
from freerun.settings.defaults import complete
from freerun.settings.factories import make_factory
from freerun.settings.registry import ALGORITHMS, MODES, make_config
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.tools.bench import bare_limit
from freerun.training import train

SAMPLE_SECONDS = 0.1
WINDOW_SECONDS = 1.0
FULL_SPEED = 0.9
FIRST_LOOK = 3
"""The update after which the run is stopped for the first time: it has come to full speed."""
LIMIT_SECONDS = 0.8
EPISODE_STEPS = 100
NO_LEARNING_RATE = 1e-12
"""Too small to change a weight, so that the policy goes on to act at random."""
KINDS = ("collecting", "training", "training, policy kept")


@dataclass(frozen=True)
class Options:
    env: str = "freerun/NetworkDefence-v0"
    """freerun/NetworkDefence-v0, or cyborg/CAGE2-v0 with --cyborg-path."""
    cyborg_path: Path | None = None
    """The folder that holds the real CybORG."""
    modes: tuple[str, ...] = tuple(mode for mode in MODES if MODES[mode].traits.whole_episodes)
    """Ways of collecting."""
    num_workers: int = os.cpu_count() or 1
    """Worker processes: the environment keeps a core busy."""
    envs_per_worker: int = 1
    """Of mode `freerun`: environments that share a call of the policy."""
    num_epochs: int = 4
    """Of every PPO update."""
    stretches: int = 12
    """Of 100 episodes each, in every run."""
    repeats: int = 3
    """Runs of each."""
    output: Path = Path(__file__).parent / "results" / "cyber"
    """Folder for cyber-….json and cyber-….md."""

    @property
    def env_args(self) -> dict[str, Any]:
        return {} if self.cyborg_path is None else {"cyborg_path": str(self.cyborg_path)}


class Limit:
    """Bare environments on all cores: they step while `rate` measures them, and are stopped otherwise."""

    def __init__(self, counts: Any, processes: list[Any]):
        self._counts = counts
        self.pids = [process.pid for process in processes]
        tell(self.pids, signal.SIGSTOP)

    def rate(self, seconds: float) -> float:
        """Steps per second of all cores at once."""
        tell(self.pids, signal.SIGCONT)
        began, before = time.perf_counter(), self._counts[:, 0].sum()
        time.sleep(seconds)
        tell(self.pids, signal.SIGSTOP)
        return float((self._counts[:, 0].sum() - before) / (time.perf_counter() - began))


def tell(pids: Iterable[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


class Turns:
    """An algorithm whose updates end with a look at the limit, while everything else of the run stands still."""

    def __init__(self, algorithm: Any, learns: bool, limit: Limit):
        self._algorithm, self._learns, self._limit = algorithm, learns, limit
        self.policy, self.demand = algorithm.policy, algorithm.demand
        self.observe, self.state_dict = algorithm.observe, algorithm.state_dict
        self.load_state_dict = algorithm.load_state_dict
        self.collector: Collector | None = None
        self._pids: list[int] = []
        self._num_updates = 0
        self._since: tuple[float, int, float] | None = None  # when, at which step, beside which limit
        self.stretches: list[dict[str, float]] = []

    def update(self, version: int, progress: float) -> Metrics:
        metrics = self._algorithm.update(version, progress) if self._learns else {}
        if not self._learns:
            self._algorithm._segments, self._algorithm._sizes = [], []
        self._num_updates += 1
        if self._num_updates >= FIRST_LOOK:
            self._look()
        return metrics

    def _look(self) -> None:
        assert self.collector is not None
        tell(self._pids, signal.SIGSTOP)
        now, steps = time.perf_counter(), self.collector.counts().steps_delivered
        if not self._pids:  # the first one only begins a stretch
            # Parents of others go on: should this process be killed, they must hear of it and end their children.
            family = {it.pid: it.ppid() for it in psutil.Process().children(recursive=True)}
            self._pids = [pid for pid in family if pid not in family.values() and pid not in self._limit.pids]
            tell(self._pids, signal.SIGSTOP)
        limit = self._limit.rate(LIMIT_SECONDS)
        if self._since is not None:
            began, before, earlier_limit = self._since
            rate = (steps - before) / (now - began)
            self.stretches.append({"steps_per_second": rate, "limit": (limit + earlier_limit) / 2})
        self._since = time.perf_counter(), steps, limit
        tell(self._pids, signal.SIGCONT)


def measure(options: Options, mode: str, limit: Limit, kind: str) -> dict[str, Any]:
    """Stretches once warm, and the seconds from nothing to full speed."""
    total_episodes = 100 * (FIRST_LOOK + options.stretches)
    settings: dict[str, Any] = {"env": options.env, "mode": mode, "total_episodes": total_episodes, "quiet": True}
    settings |= {"episodes_per_update": 100, "num_epochs": options.num_epochs, "minibatch_size": 2000}
    settings |= {"num_workers": 1 if mode == "sequential" else options.num_workers, "env_args": options.env_args}
    if mode == "freerun":
        settings["envs_per_worker"] = options.envs_per_worker
    if kind == "training, policy kept":
        settings["learning_rate"] = NO_LEARNING_RATE
    learns = kind != "collecting"
    config = complete(make_config(settings))
    pool = Pool(make_factory(config))
    algorithm = Turns(
        ALGORITHMS[config.algo].load()(pool.factory.spec, config.algorithm, 0, "cpu", False), learns, limit
    )
    torch.set_num_threads(1)
    began = time.perf_counter()
    collector = algorithm.collector = pool.collector(config, algorithm, StartPoint())
    samples: list[tuple[float, int]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS) and not algorithm.stretches:
            samples.append((time.perf_counter() - began, collector.counts().steps_delivered))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        train(algorithm, collector, Budget(None, total_episodes), Ledger(), [])
    finally:
        done.set()
        thread.join()
        pool.close()
    rate = statistics.median(stretch["steps_per_second"] for stretch in algorithm.stretches)
    return {"stretches": algorithm.stretches, "seconds_to_full_speed": full_speed(samples, rate)}


def full_speed(samples: list[tuple[float, int]], rate: float) -> float:
    """When the first second began in which 90 % of that rate was reached."""
    width = round(WINDOW_SECONDS / SAMPLE_SECONDS)
    for early, late in zip(samples, samples[width:], strict=False):
        if (late[1] - early[1]) / (late[0] - early[0]) >= FULL_SPEED * rate:
            return early[0]
    return samples[-1][0]


def run_all(options: Options) -> dict[str, Any]:
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {mode: {kind: [] for kind in KINDS} for mode in options.modes}
    factory = GymnasiumFactory(options.env, options.env_args)
    with bare_limit.stepping(factory, os.cpu_count() or 1) as (counts, processes):
        limit = Limit(counts, processes)
        for _ in range(options.repeats):
            for mode in options.modes:
                for kind, found in runs[mode].items():
                    found.append(measure(options, mode, limit, kind))
                    share = statistics.median(shares(found[-1:]))
                    print(f"{mode} {kind}: {share:.1%}, {found[-1]['seconds_to_full_speed']:.1f} s", flush=True)
    return {
        "env": options.env,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "num_workers": options.num_workers,
        "envs_per_worker": options.envs_per_worker,
        "num_epochs": options.num_epochs,
        "modes": runs,
    }


def shares(runs: list[dict[str, Any]]) -> list[float]:
    return [it["steps_per_second"] / it["limit"] for run in runs for it in run["stretches"]]


def markdown(results: dict[str, Any]) -> str:
    stretches = [
        it for runs in results["modes"].values() for kind in runs.values() for run in kind for it in run["stretches"]
    ]
    numbers = [
        sum(len(run["stretches"]) for run in kind) for runs in results["modes"].values() for kind in runs.values()
    ]
    count = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
    limits = statistics.quantiles([it["limit"] / EPISODE_STEPS for it in stretches], n=4)
    lines = [
        f"# Episodes per second on {results['env']}",
        "",
        f"{results['machine']}; {results['num_workers']} workers (sequential: 1), of `freerun` with "
        f"{results['envs_per_worker']} environments each. Bare limit: {limits[1]:,.1f} episodes/s "
        f"({limits[0]:,.1f} – {limits[2]:,.1f}).",
        f"PPO: 100 episodes an update, {results['num_epochs']} epochs. Medians (quartiles) of "
        f"{count} stretches of 100 episodes, each beside the limit just before",
        "and just after it; `benchmarks/cyber.py` wrote this.",
        "",
        "*Policy kept*: PPO computes everything at a learning rate of practically zero, so that the simulator is given "
        "the same kind of actions as in the limit.",
        "",
        "| mode | collecting, episodes/s | share of limit, collecting | training, episodes/s "
        "| share of limit, training | policy kept, episodes/s | share of limit, policy kept | seconds to full speed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, runs in results["modes"].items():
        cells = []
        for kind in KINDS:
            found = runs.get(kind)
            if found is None:
                cells += ["not measured", "–"]
                continue
            rates = [it["steps_per_second"] / EPISODE_STEPS for run in found for it in run["stretches"]]
            low, middle, high = statistics.quantiles(rates, n=4)
            cells.append(f"{middle:,.1f} ({low:,.1f} – {high:,.1f})")
            low, middle, high = statistics.quantiles(shares(found), n=4)
            cells.append(f"{middle:.1%} ({low:.0%} – {high:.0%})")
        starts = [run["seconds_to_full_speed"] for run in runs["collecting"]]
        lines.append(f"| `{mode}` | {' | '.join(cells)} | {statistics.median(starts):.1f} |")
    return "\n".join(lines) + "\n"


def open_results(path: Path) -> ResultFile:
    return ResultFile(path, {}, lambda content: content["modes"])


def write_reports(folder: Path) -> None:
    for path in folder.glob("cyber-*.json"):
        file = open_results(path)
        write_report(path.with_suffix(".md"), markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    results = run_all(options)
    print(markdown(results))
    file = open_results(options.output / f"cyber-{options.env.rpartition('/')[2].lower()}.json")
    same = ("machine", "num_workers", "envs_per_worker", "num_epochs")
    file.content = merge(file.content, json.loads(json.dumps(results)), "modes", *same)
    file.save(*results["modes"])
    write_reports(options.output)


if __name__ == "__main__":
    main()
