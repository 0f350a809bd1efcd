"""RoughDrone as tensors: the simulator alone, with the policy, and with PPO learning, in turn and at the same time.

The work of every run is the same: so many updates, each from 24 steps of all environments. Tc is the time to collect
them without learning, Tl the time to learn without collecting; taking turns takes Tc + Tl, and the ideal is the longer
of the two. The number of epochs is chosen so that the two are about equal, unless it is given. How near the ideal one
GPU can come is seen from two bare loops at once, one that collects and one that learns, with nothing between them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from run_file import ResultFile, merge, write_report

from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.collecting.tensors.tensor_rollout import TensorRollout
from freerun.core import Acceleration, TensorSegment
from freerun.cuda_graphs import GraphedStep, fused
from freerun.experiment import run
from freerun.settings.registry import make_config
from freerun_envs.drone_sim import RoughDroneSim

NUM_STEPS = 24
MODES = ("sync", "batch", "continuous")
BARE = ("collect", "learn", "at once")
MOST_EPOCHS = 40


@dataclass(frozen=True)
class Options:
    num_envs: tuple[int, ...] = (4096, 65536)
    """Drones."""
    task: str = "hover"
    """hover, waypoint or explore."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Of simulator and learner."""
    accelerations: tuple[Acceleration, ...] = ("graph", "compile")
    """Kernels as they are, recorded as CUDA graphs; or fused as well."""
    num_updates: int = 100
    """Of every run."""
    num_epochs: int | None = None
    """Passes over the data of an update."""
    num_minibatches: tuple[int, ...] = (4, 16)
    """In each pass: few large ones fill a GPU, many small ones leave room on it."""
    hidden_sizes: tuple[int, ...] = (128, 128)
    """Of policy and value function."""
    repeats: int = 3
    """Interleaved; the medians count."""
    output: Path | None = None
    """Folder for tensor_modes.json and .md."""


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds_of(work: Any, device: str, times: int) -> float:
    work()
    work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


@dataclass(frozen=True)
class Case:
    options: Options
    num_envs: int
    acceleration: Acceleration
    num_minibatches: int

    def settings(self, num_epochs: int) -> dict[str, Any]:
        return {
            "num_epochs": num_epochs,
            "minibatch_size": self.num_envs * NUM_STEPS // self.num_minibatches,
            "hidden_sizes": self.options.hidden_sizes,
            "acceleration": self.acceleration,
            "normalize_obs": False,
            "normalize_reward": False,
        }

    def make(self, num_epochs: int) -> tuple[PPO, TensorRollout]:
        device = self.options.device
        sim = RoughDroneSim(self.num_envs, device, self.options.task, stagger=True)
        learner = PPO(sim.spec, PPOConfig(**self.settings(num_epochs)), 0, device, False)
        rollout = TensorRollout(sim, learner.policy.on(sim.device, 0), NUM_STEPS, self.acceleration)
        rollout.load(learner.policy.weights, 0)
        return learner, rollout


def lessons(learner: PPO, segment: TensorSegment) -> Callable[[], None]:
    def learn() -> None:
        learner.observe([segment])
        learner.update(1, 0.0)

    return learn


def parts(case: Case) -> dict[str, float]:
    """Seconds for a segment: of the simulator alone, and with the policy; and for an update of one epoch, and two."""
    options = case.options
    sim = RoughDroneSim(case.num_envs, options.device, options.task, stagger=True)
    action = torch.zeros((case.num_envs, 4), device=sim.device).uniform_(-1.0, 1.0)
    step = fused(sim.step, case.acceleration)

    def steps() -> None:
        for _ in range(NUM_STEPS):
            step(action)

    alone = GraphedStep(steps, sim.device, (), "graph")
    learner, rollout = case.make(1)
    segment = rollout.collect()
    learner_of_two, _ = case.make(2)
    return {
        "simulator": seconds_of(lambda: alone(1), options.device, 10),
        "with policy": seconds_of(rollout.collect, options.device, 10),
        "update of 1 epoch": seconds_of(lessons(learner, segment), options.device, 5),
        "update of 2 epochs": seconds_of(lessons(learner_of_two, segment), options.device, 5),
    }


def balanced(found: dict[str, float]) -> int:
    """So many epochs that learning takes about as long as collecting."""
    an_epoch = found["update of 2 epochs"] - found["update of 1 epoch"]
    return min(MOST_EPOCHS, max(1, 1 + round((found["with policy"] - found["update of 1 epoch"]) / an_epoch)))


def bare_loops(case: Case, num_epochs: int) -> dict[str, float]:
    """Seconds of collecting alone, of learning alone, and of both at once until both are through."""
    device, times = case.options.device, case.options.num_updates
    learner, rollout = case.make(num_epochs)
    learn = lessons(learner, rollout.collect())
    found = {
        "collect": seconds_of(rollout.collect, device, times) * times,
        "learn": seconds_of(learn, device, times) * times,
    }

    def learn_all() -> None:
        own = torch.cuda.Stream() if device.startswith("cuda") else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            for _ in range(times):
                learn()

    thread = threading.Thread(target=learn_all)
    synchronize(device)
    began = time.perf_counter()
    thread.start()
    for _ in range(times):
        rollout.collect()
    thread.join()
    synchronize(device)
    return {**found, "at once": time.perf_counter() - began}


def seconds_of_run(case: Case, num_epochs: int, mode: str) -> float:
    """Without the first updates, in which libraries load and graphs are recorded."""
    options, num_envs = case.options, case.num_envs
    settings: dict[str, Any] = {
        **case.settings(num_epochs),
        "env": "freerun/RoughDrone-v0",
        "env_args": {"task": options.task},
        "mode": mode,
        "num_envs": num_envs,
        "device": options.device,
        "total_steps": (options.num_updates + options.num_updates // 5) * num_envs * NUM_STEPS,
        "quiet": True,
    }
    if mode == "continuous":
        settings |= {"collection_batch_size": num_envs * NUM_STEPS, "max_queue_size": 2}
    with tempfile.TemporaryDirectory() as folder:
        result = run(make_config({**settings, "run_dir": Path(folder) / "run"}))
        lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [float(json.loads(line)["wall_seconds"]) for line in lines]
    num_first = options.num_updates // 5
    return (seconds[-1] - seconds[num_first - 1]) / (len(seconds) - num_first) * options.num_updates


def measure(case: Case) -> dict[str, Any]:
    found = parts(case)
    num_epochs = case.options.num_epochs or balanced(found)
    print(f"{case}: {found}, {num_epochs} epochs", flush=True)
    runs: dict[str, list[float]] = {name: [] for name in (*BARE, *MODES)}
    for _ in range(case.options.repeats):
        for name, seconds in bare_loops(case, num_epochs).items():
            runs[name].append(seconds)
        for mode in MODES:
            runs[mode].append(seconds_of_run(case, num_epochs, mode))
        print({name: round(values[-1], 3) for name, values in runs.items()}, flush=True)
    return {
        "num_envs": case.num_envs,
        "acceleration": case.acceleration,
        "num_minibatches": case.num_minibatches,
        "num_epochs": num_epochs,
        "parts": found,
        "runs": runs,
    }


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "# RoughDrone as tensors",
        "",
        f"{results['machine']}, torch {results['torch']}; task {results['task']}, PPO with {results['hidden_sizes']} "
        f"hidden units, {results['num_updates']} updates of {NUM_STEPS} steps of all drones. Medians (lowest – "
        "highest) of interleaved runs; `benchmarks/tensor_modes.py` wrote this.",
        "",
        "| drones | kernels | simulator alone, steps/s | and policy | epochs × minibatches | Tc | Tl "
        "| two bare loops at once | sync | batch (v2) | continuous (v1) |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in results["cases"]:
        per_segment = case["num_envs"] * NUM_STEPS
        steps = per_segment * results["num_updates"]
        runs = {name: statistics.median(values) for name, values in case["runs"].items()}
        ideal = max(runs["collect"], runs["learn"])
        cells = [f"{case['num_envs']:,}", case["acceleration"], f"{per_segment / case['parts']['simulator']:,.0f}"]
        cells += [
            f"{per_segment / case['parts']['with policy']:,.0f}",
            f"{case['num_epochs']} × {case['num_minibatches']}",
        ]
        cells += [f"{runs[name]:.2f} s" for name in ("collect", "learn")]
        cells.append(f"{runs['at once']:.2f} s, {ideal / runs['at once']:.0%} of the ideal")
        for mode in MODES:
            values = case["runs"][mode]
            cells.append(
                f"{runs[mode]:.2f} s ({min(values):.2f} – {max(values):.2f}), {steps / runs[mode]:,.0f} steps/s, "
                f"{runs['sync'] / runs[mode]:.2f} ×, {ideal / runs[mode]:.0%} of the ideal"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def row_name(case: dict[str, Any]) -> str:
    return f"{case['num_envs']:,} drones, {case['acceleration']}, {case['num_minibatches']} minibatches"


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "tensor_modes.json", {}, lambda content: map(row_name, content["cases"]))


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "tensor_modes.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    on_gpu = options.device.startswith("cuda")
    torch.set_num_threads(1)
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "task": options.task,
        "hidden_sizes": list(options.hidden_sizes),
        "num_updates": options.num_updates,
        "cases": [
            measure(Case(options, num_envs, acceleration, num_minibatches))
            for acceleration in options.accelerations
            for num_envs in options.num_envs
            for num_minibatches in options.num_minibatches
        ],
    }
    print(markdown(results))
    if options.output is not None:
        file = open_results(options.output)
        earlier = {row_name(case): case for case in file.content.get("cases", [])}
        cases = {"cases": {row_name(case): case for case in results["cases"]}}
        same = ("machine", "torch", "task", "hidden_sizes", "num_updates")
        merged = merge({**file.content, "cases": earlier} if earlier else {}, {**results, **cases}, "cases", *same)
        file.content = {**merged, "cases": list(merged["cases"].values())}
        file.save(*cases["cases"])
        write_reports(options.output)


if __name__ == "__main__":
    main()
