"""Mode `ray`: fifty actors on few cores, what weights cost them, and clusters that lose a node.

- `efficiency`: steps/s × mean time of a bare step / actors, once warm, while PPO trains (as in throughput.py); with the
  usual 64-64 policy, and with one of 2 MB. Publishing and fetching weights as shares of the time.
- `nodes`: clusters of 2 and 4 nodes simulated on this machine, one killed in the middle of a run at --max-lag 0
  --deterministic: are the books and the final weights those of an undisturbed run?

Every run has a process of its own; repeats are interleaved; tables show medians and spreads.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
from run_file import ResultFile, write_report
from throughput import WARM_UP_UPDATES, bare_step

RESULTS = "ray.json"
STRAGGLER = "freerun/Straggler-v0"
POLICIES = {"64-64": (64, 64), "2 MB": (620, 620)}
NODES = (2, 4)


@dataclass(frozen=True)
class Options:
    repeats: int = 3
    """How often each case is run."""
    num_workers: int = 50
    """Actors."""
    num_updates: int = 10
    """Updates measured, after the first ones."""
    what: tuple[str, ...] = ("efficiency", "nodes")
    """Parts to run."""
    output: Path = Path(__file__).parent / "results" / "ray"
    """Folder for ray.json and ray.md; runs add to what is there."""
    case: str | None = None
    """For the script's own use: run one case and print its figures."""


# ---------------------------------------------------------------------------------------------- efficiency


def measure_efficiency(policy: str, num_workers: int, num_updates: int) -> dict[str, float]:
    import freerun
    from freerun.collecting.modes.ray_mode import RayActors

    noted: dict[str, float] = {}
    close = RayActors.close

    def noting_close(self: RayActors) -> None:
        noted.update(publish_seconds=self.workers.publish_seconds, weights_seconds=self.workers.weights_seconds)
        close(self)

    RayActors.close = noting_close  # type: ignore[method-assign, assignment]
    memory: list[float] = []
    threading.Thread(target=_look_at_memory, args=(memory, num_workers), daemon=True).start()
    started = time.perf_counter()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = freerun.train(
            STRAGGLER,
            mode="ray",
            num_workers=num_workers,
            max_lag=1,
            episodes_per_update=num_workers,
            total_episodes=num_workers * (num_updates + WARM_UP_UPDATES),
            hidden_sizes=POLICIES[policy],
            num_epochs=4 if policy == "64-64" else 1,
            minibatch_size=2000,
            quiet=True,
            run_dir=Path(folder) / "run",
        )
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[WARM_UP_UPDATES - 1], lines[-1]
    seconds = last["wall_seconds"] - first["wall_seconds"]
    wall_seconds = result.summary["wall_seconds"]
    return {
        "steps_per_second": (last["step"] - first["step"]) / seconds,
        "bare_step_seconds": bare_step(STRAGGLER)[0],
        "startup_seconds": result.summary["startup_seconds"],
        "warm_seconds": result.summary["startup_seconds"] + lines[0]["wall_seconds"],
        "publish_share": noted["publish_seconds"] / wall_seconds,
        "fetch_share": noted["weights_seconds"] / (num_workers * wall_seconds),
        "weights_megabytes": result.policy.weights.nbytes / 1e6,
        "actor_megabytes": statistics.mean(memory) if memory else 0.0,
        "lag_max": result.summary["lag_max"],
        "load_before": load,
        "seconds": time.perf_counter() - started,
    }


def _look_at_memory(sink: list[float], num_workers: int) -> None:
    """The actors' own memory (USS), looked at once, when all are there."""
    while not sink:
        time.sleep(2.0)
        sizes = []
        for process in psutil.Process().children(recursive=True):
            try:
                if "FreerunActor" in "".join(process.cmdline()):
                    sizes.append(process.memory_full_info().uss / 1e6)
            except psutil.Error:
                continue
        if len(sizes) >= num_workers:
            sink[:] = sizes


# ---------------------------------------------------------------------------------------------- nodes


def measure_nodes(num_nodes: int) -> dict[str, float]:
    """Train on a cluster, kill a node after two updates, and compare with a run in this process."""
    import ray
    from ray.cluster_utils import Cluster

    import freerun
    from freerun.collecting.ray.ray_cluster import private_environment

    num_workers = 2 * num_nodes
    settings: dict[str, Any] = {
        "total_episodes": 120,
        "episodes_per_update": 20,
        "num_epochs": 2,
        "deterministic": True,
        "quiet": True,
    }
    with tempfile.TemporaryDirectory() as name, private_environment():
        folder = Path(name)
        reference = freerun.train("CartPole-v1", mode="sequential", run_dir=folder / "reference", **settings)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=2) for _ in range(num_nodes - 1)]
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        removed: list[float] = []

        def remove_one() -> None:
            metrics = folder / "run" / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
                time.sleep(0.01)
            cluster.remove_node(nodes[0], allow_graceful=False)
            removed.append(time.perf_counter())

        thread = threading.Thread(target=remove_one)
        thread.start()
        result = freerun.train(
            f"{Path(__file__).stem}:SlowCartPole",
            mode="ray",
            num_workers=num_workers,
            cpus_per_worker=0.5,
            max_lag=0,
            run_dir=folder / "run",
            **settings,
        )
        thread.join()
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        ray.shutdown()
        cluster.shutdown()
    ledger = result.summary["ledger"]
    updates = [0.0, *(line["wall_seconds"] for line in lines)]
    return {
        "num_workers": num_workers,
        "worker_restarts": result.summary["worker_restarts"],
        "episodes": ledger["trained"],
        "started": ledger["started"],
        "rerun": ledger["rerun"],
        "longest_update_seconds": max(b - a for a, b in itertools.pairwise(updates)),
        "same_books": float(ledger["episodes_by_length"] == reference.summary["ledger"]["episodes_by_length"]),
        "same_weights": float(np.array_equal(result.policy.weights, reference.policy.weights)),
    }


class SlowCartPole:
    """CartPole-v1 with a pause, so that a node can be lost in the middle of an episode."""

    def __new__(cls) -> Any:
        import gymnasium

        class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
            def step(self, action: Any) -> Any:
                time.sleep(0.005)
                return self.env.step(action)

        return Slow(gymnasium.make("CartPole-v1"))


# ---------------------------------------------------------------------------------------------- all cases


def cases(options: Options) -> list[tuple[str, str]]:
    chosen = [("efficiency", policy) for policy in POLICIES if "efficiency" in options.what]
    return chosen + [("nodes", str(number)) for number in NODES if "nodes" in options.what]


def run_all(options: Options) -> None:
    file = open_results(options.output)
    report = file.content
    report["machine"] = {"cores": os.cpu_count()}
    for repeat in range(options.repeats):
        for kind, case in cases(options):
            arguments = ["--num-workers", str(options.num_workers), "--num-updates", str(options.num_updates)]
            command = [sys.executable, __file__, "--case", f"{kind}:{case}", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{kind} {case} failed:\n{done.stdout}\n{done.stderr}")
            figures = json.loads(done.stdout.splitlines()[-1])
            key = f"{case} × {options.num_workers}" if kind == "efficiency" else case
            samples = report.setdefault(kind, {}).setdefault(key, [])
            if not file.is_current(f"{kind} {key}"):  # figures of other sources are not to be mixed
                samples.clear()
            samples.append(figures)
            file.save(f"{kind} {key}")
            print(f"[{repeat + 1}/{options.repeats}] {kind} {key}: {figures}", flush=True)
    print(write_reports(options.output))


def open_results(folder: Path) -> ResultFile:
    def rows(report: dict[str, Any]) -> list[str]:
        return [f"{kind} {key}" for kind in ("efficiency", "nodes") for key in report.get(kind, {})]

    return ResultFile(folder / RESULTS, {}, rows)


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "ray.md", tables(file.content), file.stamped())


def tables(report: dict[str, Any]) -> str:
    def shown(samples: list[dict[str, float]], name: str, form: str, scale: float = 1.0, unit: str = "") -> str:
        values = sorted(scale * sample[name] for sample in samples)
        spread = f" ({values[0]:{form}}–{values[-1]:{form}})" if len(values) > 1 else ""
        return f"{statistics.median(values):{form}}{unit}{spread}"

    lines = [f"{report['machine']['cores']} cores; median (lowest–highest) of runs in processes of their own."]
    if "efficiency" in report:
        lines += [
            "",
            f"`{STRAGGLER}`, --max-lag 1, PPO training all the while. Warm: from `freerun.train()` to the end of the "
            "first update. Publish: the learner's time for `ray.put`; fetch: an actor's time for new weights; both as "
            "shares of the run.",
            "",
            "| policy × actors | runs | weights MB | steps/s | efficiency | start-up s | warm s | publish | fetch "
            "| MB per actor |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        every = [sample for samples in report["efficiency"].values() for sample in samples]
        bare = statistics.median(sample["bare_step_seconds"] for sample in every)
        for key, samples in report["efficiency"].items():
            num_workers = int(key.rpartition(" ")[2])
            lines.append(
                f"| {key} | {len(samples)} | {shown(samples, 'weights_megabytes', '.2f')} "
                f"| {shown(samples, 'steps_per_second', ',.0f')} "
                f"| {shown(samples, 'steps_per_second', '.1f', 100 * bare / num_workers, ' %')} "
                f"| {shown(samples, 'startup_seconds', '.1f')} | {shown(samples, 'warm_seconds', '.1f')} "
                f"| {shown(samples, 'publish_share', '.2f', 100, ' %')} "
                f"| {shown(samples, 'fetch_share', '.2f', 100, ' %')} "
                f"| {shown(samples, 'actor_megabytes', '.0f')} |"
            )
    if "nodes" in report:
        lines += [
            "",
            "One node killed in the middle of a run, at --max-lag 0 "
            "--deterministic, beside the same run in one process.",
            "",
            "| nodes | runs | actors | actors replaced | episodes run again | trained / started | longest update s "
            "| same books | same weights |",
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
        ]
        for key, samples in report["nodes"].items():
            same = [
                "yes" if all(sample[name] for sample in samples) else "NO" for name in ("same_books", "same_weights")
            ]
            trained = {f"{sample['episodes']} / {sample['started']}" for sample in samples}
            lines.append(
                f"| {key} | {len(samples)} | {samples[0]['num_workers']} | {shown(samples, 'worker_restarts', '.0f')} "
                f"| {shown(samples, 'rerun', '.0f')} | {', '.join(sorted(trained))} "
                f"| {shown(samples, 'longest_update_seconds', '.1f')} | {same[0]} | {same[1]} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.case is None:
        run_all(options)
        return
    kind, _, case = options.case.partition(":")
    if kind == "efficiency":
        figures = measure_efficiency(case, options.num_workers, options.num_updates)
    else:
        figures = measure_nodes(int(case))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
