"""How much of collecting and learning overlaps, in each mode, on the same work?

For every mode: Tc, the time to collect the steps without learning from them; Tl, the time to learn from them without
collecting; and the time of a run that does both. Taking turns takes Tc + Tl; the ideal is the longer of the two. A way
is not compared with another's ideal: each has its own collectors, and so its own Tc.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from run_file import ResultFile, refuse_other_settings, write_report

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import AnySegment, Counts, Demand, FloatArray, Segment
from freerun.experiment import run
from freerun.settings.registry import ALGORITHMS, make_config
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.training import train

WAYS: dict[str, dict[str, Any]] = {
    "in turn (batch, --max-lag 0)": {"mode": "batch", "max_lag": 0},
    "v2 (batch)": {"mode": "batch"},
    "v1 (continuous)": {"mode": "continuous"},
}
IN_TURN = next(iter(WAYS))


@dataclass(frozen=True)
class Options:
    env: str = "HalfCheetah-v5"
    """A Gymnasium id with actions in a Box."""
    algo: Literal["sac", "mbpo"] = "sac"
    """Who learns."""
    num_envs: int = 64
    """Environments, in every way."""
    num_collectors: int = 4
    """Collectors of `continuous`."""
    steps_per_batch: int = 1536
    """Steps of an update: 24 of each of 64 environments."""
    total_steps: int = 61_440
    """Work of every run."""
    updates_per_step: float | None = None
    """Gradient steps per environment step (if not given: as many as take as long as collecting with one collector)."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Of policy and critics."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where the learner computes."""
    repeats: int = 3
    """Runs of each; they are interleaved, and the medians count."""
    output: Path | None = None
    """Folder for overlap.json and overlap.md."""


def settings(options: Options, way: dict[str, Any], updates_per_step: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "env": options.env,
        "algo": options.algo,
        "num_envs": options.num_envs,
        "total_steps": options.total_steps,
        "steps_per_update": options.steps_per_batch,
        "updates_per_step": updates_per_step,
        "learning_starts": 0,
        "hidden_sizes": options.hidden_sizes,
        "acceleration": "graph" if options.device.startswith("cuda") else "none",
        "device": options.device,
        "quiet": True,
        **way,
    }
    if way["mode"] == "continuous":
        found |= {"num_collectors": options.num_collectors, "collection_batch_size": options.steps_per_batch // 4}
    else:
        found["num_steps_per_env"] = options.steps_per_batch // options.num_envs
    return found


def seconds_of_run(options: Options, way: dict[str, Any], updates_per_step: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = make_config({**settings(options, way, updates_per_step), "run_dir": Path(folder) / "run"})
        return float(run(config).summary["wall_seconds"])


class Canned:
    """A collector that has everything at hand: what is left is learning."""

    num_workers = 1

    def __init__(self, segments: Sequence[Segment]):
        self._segments = segments
        self._counts = Counts()

    def counts(self) -> Counts:
        return self._counts

    def publish(self, weights: FloatArray, version: int) -> None:
        """Nobody acts."""

    def collect(self, demand: Demand) -> list[Segment]:
        return list(self._segments)

    def close(self) -> None:
        """Nothing is held."""


class NoBooks(Ledger):
    """The canned segments come again and again, which a ledger must refuse."""

    def account(self, segments: Sequence[AnySegment]) -> None:
        self.steps += sum(segment.num_steps for segment in segments)

    def check_balance(self, counts: Counts) -> None:
        """There is nothing to balance."""


def canned_segments(options: Options) -> list[Segment]:
    from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
    from freerun.collecting.rollouts.rollout import Rollout

    factory = GymnasiumFactory(options.env)
    policy = MLPActor(ActorSpec.squashed(factory.spec, options.hidden_sizes, "relu"), scalar_actions=False)
    rollout = Rollout(factory.make(8), policy, 0)
    numbers = iter(range(10**9))
    segment = next(rollout.segments(options.steps_per_batch // 8, lambda wait: next(numbers))).copy()
    rollout.close()
    return [segment]


def seconds_of_learning(options: Options, updates_per_step: float, segments: list[Segment]) -> float:
    config = make_config(settings(options, WAYS[IN_TURN], updates_per_step))
    factory = GymnasiumFactory(options.env)
    learner = ALGORITHMS[options.algo].load()(factory.spec, config.algorithm, 0, options.device, False)
    began = time.perf_counter()
    train(learner, Canned(segments), Budget(options.total_steps, None), NoBooks(), [])
    return time.perf_counter() - began


def balanced(options: Options, segments: list[Segment]) -> float:
    """The ratio at which learning takes as long as collecting with one collector."""
    collecting = seconds_of_run(options, WAYS["v2 (batch)"], 0.0)
    seconds_of_learning(options, 0.05, segments)  # libraries load
    short, long = (seconds_of_learning(options, ratio, segments) for ratio in (0.05, 0.15))
    per_ratio = max(1e-6, (long - short) / 0.1)
    ratio = max(0.01, 0.05 + (collecting - short) / per_ratio)
    print(f"collecting takes {collecting:.1f} s; {ratio:.3f} updates per step take about as long", flush=True)
    return round(ratio, 3)


def measure(options: Options) -> dict[str, Any]:
    torch.set_num_threads(1)
    if options.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    segments = canned_segments(options)
    ratio = options.updates_per_step or balanced(options, segments)
    ways: dict[str, dict[str, list[float]]] = {name: {"collect": [], "learn": [], "both": []} for name in WAYS}
    for repeat in range(options.repeats):
        for name, way in WAYS.items():
            found = ways[name]
            found["collect"].append(seconds_of_run(options, way, 0.0))
            found["learn"].append(seconds_of_learning(options, ratio, segments))
            found["both"].append(seconds_of_run(options, way, ratio))
            print(repeat, name, {key: round(values[-1], 2) for key, values in found.items()}, flush=True)
    return {
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), learner on "
        + (torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"),
        "torch": torch.__version__,
        "options": {name: str(value) for name, value in vars(options).items()},
        "updates_per_step": ratio,
        "ways": ways,
    }


def markdown(results: dict[str, Any]) -> str:
    options = results["options"]
    lines = [
        "# How much of collecting and learning overlaps",
        "",
        f"{options['env']} × {options['num_envs']}, {options['algo']}, {int(options['total_steps']):,} steps, "
        f"{results['updates_per_step']} updates per step; {results['machine']}, torch {results['torch']}.",
        "Seconds are medians (lowest – highest) of interleaved runs. `benchmarks/overlap.py` wrote this.",
        "",
        "| | Tc collect alone | Tl learn alone | both | speed-up | share of the ideal max(Tc, Tl) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    in_turn = statistics.median(results["ways"][IN_TURN]["both"])
    for name, found in results["ways"].items():
        collect, learn, both = (statistics.median(found[key]) for key in ("collect", "learn", "both"))
        spreads = [f"{statistics.median(found[k]):.1f} ({min(found[k]):.1f} – {max(found[k]):.1f})" for k in found]
        lines.append(f"| {name} | {' | '.join(spreads)} | {in_turn / both:.2f} × | {max(collect, learn) / both:.0%} |")
    return "\n".join(lines) + "\n"


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "overlap.json", {}, lambda content: content["ways"])


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "overlap.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = None if options.output is None else open_results(options.output)
    if file is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        refuse_other_settings(file.content.get("options", {}), settings, "env", "algo", "num_envs", "total_steps")
    results = measure(options)
    print(markdown(results))
    if file is not None and options.output is not None:
        file.content = results
        file.save(*results["ways"])
        write_reports(options.output)


if __name__ == "__main__":
    main()
