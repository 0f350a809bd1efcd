"""What one action from an image costs a worker, in numpy and in torch, and what it costs to hand an image over.

Everything runs on one thread. Each number is the fastest of many calls, in microseconds per row, because other programs
on the machine can only make a call slower. Numbers and tables are written to results/image_actors.
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
from run_file import ResultFile, write_report
from threadpoolctl import threadpool_limits

from freerun.algorithms.policies.torch_actor import TorchActor
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.collecting.workers.slot_workers import read_slot, write_slot
from freerun.core import EnvSpec, ImagePart, Segment
from freerun.tools.bench.load_meter import processor
from freerun.transport import processes
from freerun.transport.slots import Slots

SHAPE = (4, 84, 84)
SPEC = EnvSpec(spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(6), images=(ImagePart(0, SHAPE),))
SEGMENT_STEPS = (128, 1)
"""Of a usual segment, and of the shortest one, which bears the cost of a whole segment alone."""


@dataclass(frozen=True)
class Options:
    calls: int = 200
    """Calls of which the fastest counts."""
    output: Path = Path(__file__).parent / "results" / "image_actors"
    """Folder for image_actors.json and .md."""


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


def slot_us(spec: EnvSpec, num_steps: int, num_calls: int) -> tuple[float, float]:
    """To write a segment into a slot and to copy it out again, per step."""
    here = (num_steps, 1)
    frames = np.random.default_rng(0).integers(0, 256, (num_steps + 4, 84, 84), np.uint8)
    stacks = np.ascontiguousarray(np.moveaxis(np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0), -1, 1))
    obs, next_obs = stacks[:-1, None], stacks[1:, None]
    number, real, flag = np.zeros(here, np.int64), np.zeros(here, np.float32), np.zeros(here, np.bool_)
    segment = Segment(obs, number, real, real, flag, flag, next_obs, number, number, seconds=0.0)
    shared = Slots(processes.context(), 1, num_steps, 1, spec)
    write = best_us(lambda: write_slot(shared[0], 0, segment), num_calls) / num_steps

    def write_and_read() -> None:
        write_slot(shared[0], 0, segment)
        read_slot(shared[0])

    return write, best_us(write_and_read, num_calls) / num_steps - write


def measure(num_calls: int) -> dict[str, Any]:
    """All numbers, in microseconds per row."""
    rows = np.random.default_rng(0).integers(0, 256, (4, *SHAPE), np.uint8)
    acting: dict[str, list[float]] = {}
    for name, actor in actors().items():
        noise = actor.draw(np.random.default_rng(0), len(rows))
        head, act = np.zeros(actor.head_size, np.float32), actor.single()
        calls = {1: functools.partial(act, rows[0], noise[0], head), 4: functools.partial(actor.act, rows, noise)}
        acting[name] = [best_us(call, max(20, num_calls // size)) / size for size, call in calls.items()]
    specs = {"whole observations": SPEC, "stacks of frames, each frame once": replace(SPEC, num_frames=4)}
    crossing = [
        {"in a slot": name, "steps": num_steps, "us": slot_us(spec, num_steps, num_calls)}
        for name, spec in specs.items()
        for num_steps in SEGMENT_STEPS
    ]
    return {"acting": acting, "crossing": crossing, "machine": processor()}


def report(found: dict[str, Any]) -> str:
    about = f"Microseconds per row, the fastest call, one thread, {found['machine']}, by `benchmarks/image_actors.py`."
    lines = [
        "# Acting on images",
        "",
        about,
        "",
        "| policy for 84 × 84 × 4 bytes | one row | 4 rows |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |" for name, cells in found["acting"].items()),
        "",
        "To hand over a step with its two observations of 84 × 84 × 4 bytes (before and after it), where a segment has "
        "so many steps. A segment's number goes through a pipe besides, once.",
        "",
        "| in a slot | steps | write | read | both |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for one in found["crossing"]:
        write, read = one["us"]
        lines.append(f"| {one['in a slot']} | {one['steps']} | {write:.1f} | {read:.1f} | {write + read:.1f} |")
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "image_actors.md", report(file.content), file.stamped())


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "image_actors.json", {}, lambda _: ["all"])


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    with threadpool_limits(1):
        found = measure(options.calls)
    file = open_results(options.output)
    file.content = found
    file.save("all")
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
