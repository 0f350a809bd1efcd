"""What one action from an image costs a worker, in numpy and in torch, and what it costs to hand an image over.

Everything runs on one thread. Each number is the fastest of many calls, in microseconds per row, because other programs
on the machine can only make a call slower. The table is written to results/image_actors/image_actors.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """Calls of which the fastest counts."""
    output: Path = Path(__file__).parent / "results" / "image_actors"
    """Folder for image_actors.md."""


def best_us(call: Callable[[], object], num_calls: int) -> float:
    seconds = []
    for _ in range(num_calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds) * 1e6


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


def slot_us(spec: EnvSpec, num_calls: int) -> tuple[float, float]:
    """To write an episode into a slot and to copy it out again, per step."""
    here = (SEGMENT_STEPS, 1)
    frames = np.random.default_rng(0).integers(0, 256, (SEGMENT_STEPS + 4, 84, 84), np.uint8)
    stacks = np.ascontiguousarray(np.moveaxis(np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0), -1, 1))
    obs, next_obs = stacks[:-1, None], stacks[1:, None]
    number, real, flag = np.zeros(here, np.int64), np.zeros(here, np.float32), np.zeros(here, np.bool_)
    segment = Segment(obs, number, real, real, flag, flag, next_obs, number, number, seconds=0.0)
    shared = Slots(processes.context(), 1, SEGMENT_STEPS, 1, spec)
    write = best_us(lambda: shared.write(0, 0, segment), num_calls) / SEGMENT_STEPS

    def write_and_read() -> None:
        shared.write(0, 0, segment)
        shared.read(0)

    return write, best_us(write_and_read, num_calls) / SEGMENT_STEPS - write


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    rows = np.random.default_rng(0).integers(0, 256, (4, *SHAPE), np.uint8)
    lines = ["| policy for 84 × 84 × 4 bytes | one row | 4 rows |", "| --- | ---: | ---: |"]
    with threadpool_limits(1):
        for name, actor in actors().items():
            noise = actor.draw(np.random.default_rng(0), len(rows))
            head, act = np.zeros(actor.head_size, np.float32), actor.single()
            calls = {1: functools.partial(act, rows[0], noise[0], head)}
            calls |= {size: functools.partial(actor.act, rows[:size], noise[:size]) for size in (4,)}
            cells = [best_us(call, max(20, options.calls // size)) / size for size, call in calls.items()]
            lines.append(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
        crossings = {
            "whole observations": slot_us(SPEC, options.calls),
            "stacks of frames, each frame once": slot_us(replace(SPEC, num_frames=4), options.calls),
        }
    lines += [
        "",
        f"To hand over a step with two observations of 84 × 84 × 4 bytes, in segments of {SEGMENT_STEPS} steps:",
        "",
        "| in a slot | write | read |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {write:.1f} | {read:.1f} |" for name, (write, read) in crossings.items()),
    ]
    about = f"Microseconds per row, the fastest call, one thread, {processor()}, by `benchmarks/image_actors.py`."
    report = "\n".join(["# Acting on images", "", about, "", *lines, ""])
    print(report)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "image_actors.md").write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
