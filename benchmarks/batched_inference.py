"""Steps per second with images: workers that choose their own actions, beside one batch on the learner's device.

Each case trains PPO for a few seconds on noise of 84 × 84 × 4 bytes, whose steps take a given time, with one epoch per
update. Cases take turns. Finished runs are kept in batched_inference.json, and a table of them in batched_inference.md;
those of other sources are measured again.

python benchmarks/batched_inference.py --device cuda --num-workers 16
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium import spaces
from run_file import RunFile, write_report

import freerun

NUM_FRAMES = 64
CASES: dict[str, dict[str, Any]] = {
    "freerun, workers act": {"mode": "freerun", "segment_steps": 64, "max_lag": 1},
    "sync, the learner's process acts in numpy": {"mode": "sync"},
    "sync --act-on-device": {"mode": "sync", "act_on_device": True},
}


@dataclass(frozen=True)
class Options:
    device: str = "cpu"
    """Of the learner."""
    num_workers: int = 2
    network: tuple[str, ...] = ("nature", "impala")
    total_steps: int = 2048
    """Of each case."""
    steps_per_update: int = 512
    step_seconds: float = 0.0005
    """How long a step of the environment computes."""
    repeats: int = 5
    """Runs of each case."""
    output: Path = Path(__file__).parent / "results" / "batched_inference"
    """Folder for batched_inference.json and .md."""


@dataclass(frozen=True)
class InferenceRun:
    device: str
    num_workers: int
    step_seconds: float
    network: str
    case: str
    repeat: int
    steps_per_second: float

    @property
    def key(self) -> tuple[Any, ...]:
        return astuple(self)[:-1]


class BusyPixels(gymnasium.Env[Any, Any]):
    """Noise, with steps that keep a core busy for a given time."""

    def __init__(self, step_seconds: float):
        self.observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = spaces.Discrete(6)
        self._frames = np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 4, 84, 84), np.uint8)
        self._step_seconds = step_seconds
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ends_at = time.perf_counter() + self._step_seconds
        while time.perf_counter() < ends_at:
            pass
        self._step += 1
        return self._frames[self._step % NUM_FRAMES], 1.0, False, self._step == 500, {}


def measure(options: Options, network: str, case: str) -> float:
    """Steps per second of one case."""
    with tempfile.TemporaryDirectory() as scratch:
        result = freerun.train(
            "batched_inference:BusyPixels",
            env_args={"step_seconds": options.step_seconds},
            network=network,
            device=options.device,
            num_workers=options.num_workers,
            total_steps=options.total_steps,
            steps_per_update=options.steps_per_update,
            minibatch_size=options.steps_per_update,
            num_epochs=1,
            run_dir=Path(scratch) / "run",
            quiet=True,
            **CASES[case],
        )
    return float(result.summary["steps_per_second"])


def report(records: list[InferenceRun]) -> str:
    lines = [
        "# Actions chosen by workers, and in one batch on the learner's device",
        "",
        "`benchmarks/batched_inference.py`: PPO with one epoch per update, on noise of 84 × 84 × 4 bytes. Medians "
        "(lowest – highest) of runs that took turns.",
        "",
        "| learner on | workers | a step takes | network | | runs | steps per second |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for case in dict.fromkeys(one.key[:-1] for one in records):
        rates = [one.steps_per_second for one in records if one.key[:-1] == case]
        device, num_workers, step_seconds, network, name = case
        lines.append(
            f"| {device} | {num_workers} | {step_seconds * 1e3:g} ms | {network} | {name} | {len(rates)} | "
            f"{median(rates):.0f} ({min(rates):.0f} – {max(rates):.0f}) |"
        )
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "batched_inference.json", InferenceRun)
    return write_report(folder / "batched_inference.md", report(file.records), file.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "batched_inference.json", InferenceRun)
    done = {one.key for one in file.records if file.is_current(one)}
    for repeat, network, case in itertools.product(range(options.repeats), options.network, CASES):
        key = (options.device, options.num_workers, options.step_seconds, network, case, repeat)
        if key in done:
            continue
        run = InferenceRun(*key, measure(options, network, case))
        file.replace(run, "device", "num_workers", "step_seconds", "network", "case", "repeat")
        print(f"{network:8} {case:45} {run.steps_per_second:8.0f} steps/s", flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
