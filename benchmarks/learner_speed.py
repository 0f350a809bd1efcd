"""How many gradient steps and model rollouts does the learner do in a second, eager, recorded and compiled?

Hopper's shapes (11 observations, 3 actions). Also: do the recorded and compiled steps end at the weights of the eager
ones after 100 updates from the same data and the same noise?
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from gymnasium import spaces
from run_file import ResultFile, merge, write_report

from freerun.algorithms.mbpo.mbpo import MBPO
from freerun.algorithms.mbpo.mbpo_config import MBPOConfig
from freerun.algorithms.sac.off_policy import OffPolicy
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.sac import SAC
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.core import Acceleration, EnvSpec

HOPPER = EnvSpec(
    spaces.Box(-np.inf, np.inf, (11,), np.float32),
    spaces.Box(-np.ones(3, np.float32), np.ones(3, np.float32)),
)
ROLLOUT_ROWS = 100_000
TARGETS = {"sac updates/s": 3_000, "ensemble updates/s": 3_500, "rollout rows/s": 15e6}
"""What issue 4 asks of an H200."""


@dataclass(frozen=True)
class Options:
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to measure."""
    accelerations: tuple[Acceleration, ...] = ("none", "graph", "compile")
    """Ways to run a gradient step."""
    seconds: float = 3.0
    """Length of a measurement."""
    repeats: int = 3
    """Measurements of each; the median counts."""
    output: Path | None = None
    """Folder for learner_speed.json and learner_speed.md."""


def fill(algorithm: OffPolicy, num_rows: int) -> None:
    """The same made-up steps for everyone."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn((num_rows, 11), generator=generator)
    action = torch.rand((num_rows, 3), generator=generator) * 2 - 1
    change = 0.1 * torch.randn((num_rows, 11), generator=generator) + 0.05 * action.sum(dim=1, keepdim=True)
    steps = StepBatch(obs, action, obs[:, 0] + action[:, 0], obs + change, torch.zeros(num_rows))
    device = algorithm.device
    algorithm.real_buffer.add(
        StepBatch(*(part.to(device) for part in steps)), torch.zeros(num_rows, dtype=torch.int64).to(device)
    )


def make_mbpo(acceleration: Acceleration, device: str) -> MBPO:
    config = MBPOConfig(
        acceleration=acceleration, termination="hopper", buffer_size=100_000, steps_per_update=250, rollout_length=1
    )
    algorithm = MBPO(HOPPER, config, 0, device, False)
    fill(algorithm, 50_000)
    return algorithm


def rate(work: Callable[[int], None], per_call: int, device: str, options: Options) -> list[float]:
    """Pieces of work per second."""

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    work(10)
    wait()
    began = time.perf_counter()
    work(5)
    wait()
    calls = max(1, int(5 * options.seconds / (time.perf_counter() - began)))
    rates = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        work(calls)
        wait()
        rates.append(calls * per_call / (time.perf_counter() - began))
    return rates


def measure(acceleration: Acceleration, options: Options) -> dict[str, list[float]]:
    device = options.device
    torch.set_float32_matmul_precision("high")
    sac = SAC(HOPPER, SACConfig(acceleration=acceleration, buffer_size=100_000), 0, device, False)
    fill(sac, 50_000)
    rates = {"sac updates/s": rate(sac.take_gradient_steps, 1, device, options)}
    mbpo = make_mbpo(acceleration, device)
    mbpo.dynamics.prepare(mbpo.real_buffer.newest(50_000))
    rates["ensemble updates/s"] = rate(mbpo.dynamics.take_gradient_steps, 1, device, options)
    mbpo.dynamics.hand_over(mbpo.model)
    mbpo.rollouts.prepare(mbpo.real_buffer.sample(ROLLOUT_ROWS).steps.obs, mbpo.agent.weights)
    rates["rollout rows/s"] = rate(mbpo.rollouts.take_steps, ROLLOUT_ROWS, device, options)
    return rates


def weights_after(acceleration: Acceleration, device: str, num_updates: int) -> dict[str, torch.Tensor]:
    sac = SAC(HOPPER, SACConfig(acceleration=acceleration, buffer_size=10_000), 0, device, False)
    fill(sac, 5_000)
    sac.take_gradient_steps(num_updates)
    mbpo = make_mbpo(acceleration, device)
    mbpo.dynamics.prepare(mbpo.real_buffer.newest(10_000))
    mbpo.dynamics.take_gradient_steps(num_updates)
    state = sac.agent.state_dict()
    return {
        "policy": state["actor"].cpu(),
        "critics": state["critics"].cpu(),
        "ensemble": torch.cat([part.detach().reshape(-1) for part in mbpo.dynamics.ensemble.parameters()]).cpu(),
    }


def differences(options: Options, num_updates: int = 100) -> dict[str, dict[str, float]]:
    """Largest difference from the eager weights, beside how far those have moved."""
    torch.set_float32_matmul_precision("highest")  # so that what is left is the order of sums
    eager = weights_after("none", options.device, num_updates)
    start = weights_after("none", options.device, 0)
    found = {"moved": {name: float((eager[name] - start[name]).abs().max()) for name in eager}}
    for acceleration in options.accelerations:
        if acceleration != "none":
            other = weights_after(acceleration, options.device, num_updates)
            found[acceleration] = {name: float((eager[name] - other[name]).abs().max()) for name in eager}
    return found


def markdown(results: dict[str, Any]) -> str:
    lines = [
        f"# Learner speed on {results['machine']}",
        "",
        f"torch {results['torch']}; medians (lowest – highest). `benchmarks/learner_speed.py` wrote this.",
        "",
        "| | " + " | ".join(results["rates"]) + " | wanted on an H200 |",
        "| --- |" + " --- |" * (len(results["rates"]) + 1),
    ]
    for name, target in TARGETS.items():
        cells = []
        for rates in results["rates"].values():
            found = rates[name]
            cells.append(f"{statistics.median(found):,.0f} ({min(found):,.0f} – {max(found):,.0f})")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {target:,.0f} |")
    lines += ["", "Largest difference of any weight from the eager run after 100 updates:", ""]
    lines += [
        f"- {name}: " + ", ".join(f"{k} {v:.2g}" for k, v in row.items())
        for name, row in results["differences"].items()
    ]
    return "\n".join(lines) + "\n"


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "learner_speed.json", {}, lambda content: content["rates"])


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "learner_speed.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    on_gpu = options.device.startswith("cuda")
    now: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "torch": torch.__version__,
        "options": {key: str(value) for key, value in dataclasses.asdict(options).items()},
        "rates": {},
    }
    for acceleration in options.accelerations if on_gpu else ("none",):
        began = time.perf_counter()
        now["rates"][acceleration] = measure(acceleration, options)
        print(acceleration, f"({time.perf_counter() - began:.0f} s)", now["rates"][acceleration], flush=True)
    now["differences"] = differences(options) if on_gpu else {}
    print(markdown(now))
    if options.output is not None:
        file = open_results(options.output)
        file.content = merge(file.content, now, "rates", "machine", "torch")
        file.save(*now["rates"])
        write_reports(options.output)


if __name__ == "__main__":
    main()
