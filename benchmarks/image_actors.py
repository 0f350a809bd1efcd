"""What one action from an image costs a worker, in numpy and in torch, and what it costs to hand an image over.

Everything runs on one thread. Each number is the median over many calls, in microseconds of wall time per row. The
table is written to results/image_actors/image_actors.md.
"""

from __future__ import annotations

import functools
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
from threadpoolctl import threadpool_limits

from freerun.algorithms.policies.torch_actor import TorchActor
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, ImagePart, Segment
from freerun.tools.bench.load_meter import processor
from freerun.transport import processes
from freerun.transport.slots import Slots

SHAPE = (4, 84, 84)
SPEC = EnvSpec(spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(6), images=(ImagePart(0, SHAPE),))
SEGMENT_STEPS = 128


@dataclass(frozen=True)
class Options:
    calls: int = 200
    """Calls of which the median counts."""
    output: Path = Path(__file__).parent / "results" / "image_actors"
    """Folder for image_actors.md."""


def median_us(call: Callable[[], object], num_calls: int) -> float:
    seconds = []
    for number in range(num_calls + num_calls // 10):
        started = time.perf_counter()
        call()
        if number >= num_calls // 10:  # the first ones warm up
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def actors() -> dict[str, Any]:
    """Policies of the same shape: workers run `nature` in numpy and `impala` in torch."""
    made = {name: PPO(SPEC, PPOConfig(network=name), 0, "cpu", False) for name in ("nature", "impala")}
    nature = made["nature"]
    by_torch = TorchActor(nature.net.spec, nature.net.actor, "nature", scalar_actions=True, batch_invariant=False)
    by_torch.load(nature.policy.weights)
    return {
        "nature, numpy (the workers')": nature.policy,
        "nature, torch": by_torch,
        "impala, torch (the workers')": made["impala"].policy,
    }


def slot_us(num_calls: int) -> tuple[float, float]:
    """To write a segment into a slot and to copy it out again, per step."""
    here = (SEGMENT_STEPS, 1)
    obs = np.random.default_rng(0).integers(0, 256, (*here, *SHAPE), np.uint8)
    number, real, flag = np.zeros(here, np.int64), np.zeros(here, np.float32), np.zeros(here, np.bool_)
    segment = Segment(obs, number, real, real, flag, flag, obs.copy(), number, number, seconds=0.0)
    shared = Slots(processes.context(), 1, SEGMENT_STEPS, 1, SPEC)
    write = median_us(lambda: shared.write(0, 0, segment), num_calls) / SEGMENT_STEPS

    def write_and_read() -> None:
        shared.write(0, 0, segment)
        shared.read(0)

    return write, median_us(write_and_read, num_calls) / SEGMENT_STEPS - write


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    rows = np.random.default_rng(0).integers(0, 256, (16, *SHAPE), np.uint8)
    lines = ["| policy for 84 × 84 × 4 bytes | one row | 4 rows | 16 rows |", "| --- | ---: | ---: | ---: |"]
    with threadpool_limits(1):
        for name, actor in actors().items():
            noise = actor.draw(np.random.default_rng(0), len(rows))
            head, act = np.zeros(actor.head_size, np.float32), actor.single()
            calls = {1: functools.partial(act, rows[0], noise[0], head)}
            calls |= {size: functools.partial(actor.act, rows[:size], noise[:size]) for size in (4, 16)}
            cells = [median_us(call, max(20, options.calls // size)) / size for size, call in calls.items()]
            lines.append(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
        write, read = slot_us(max(20, options.calls // 10))
    lines += [
        "",
        f"A step with an observation of 84 × 84 × 4 bytes crosses a slot in {write + read:.0f} µs: {write:.0f} to "
        f"write and {read:.0f} to read, in segments of {SEGMENT_STEPS} steps, each with two observations.",
    ]
    about = f"Microseconds per row, medians, one thread, {processor()}, by `benchmarks/image_actors.py`."
    report = "\n".join(["# Acting on images", "", about, "", *lines, ""])
    print(report)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "image_actors.md").write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
