"""Steps per second of the drone simulator alone: op by op, compiled, and (on a GPU) as a captured CUDA graph."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import tyro
from torch import Tensor

from freerun_envs.drone_sim import RoughDroneSim

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Options:
    num_envs: tuple[int, ...] = (1, 64, 1024, 4096, 16384, 65536)
    task: str = "explore"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    seconds: float = 2.0
    """For each number of drones and way of stepping."""
    compile: bool = False
    """Also with the step fused by torch.compile, which takes a minute for each number of drones."""
    num_threads: int = 1
    """Of torch, on the CPU."""


def capture(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph: a replay reads the same action tensor anew, and writes the same results again."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # CUDA's libraries set themselves up in the first steps, which must not be captured
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def steps_per_second(step: Callable[[], object], action: Tensor, seconds: float) -> float:
    """Of all drones together; random actions, drawn anew every so often so that drones do not all fall."""
    for _ in range(WARM_UP_STEPS):
        step()
    num_steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        action.uniform_(-1.0, 1.0)
        for _ in range(10):
            step()
        num_steps += 10
        if action.is_cuda:
            torch.cuda.synchronize()
    return num_steps * len(action) / (time.perf_counter() - started)


def main(options: Options) -> None:
    torch.set_num_threads(options.num_threads)
    on_gpu = torch.device(options.device).type == "cuda"
    rows = []
    for num_envs in options.num_envs:
        sim = RoughDroneSim(num_envs, options.device, options.task)
        action = torch.zeros(num_envs, 4, device=sim.device)
        ways: dict[str, Callable[[], object]] = {"eager": partial(sim.step, action)}
        if options.compile:
            ways["compiled"] = partial(torch.compile(sim.step, fullgraph=True, dynamic=False), action)
        if on_gpu:
            ways |= {f"{name}, captured": capture(step) for name, step in ways.items()}
        rates = {name: steps_per_second(step, action, options.seconds) for name, step in ways.items()}
        rows.append((num_envs, rates))
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, {options.num_threads} threads"
    print(f"RoughDrone, task {options.task}, {machine}, torch {torch.__version__}: steps per second")
    for num_envs, rates in rows:
        print(f"{num_envs:>7,} drones", *(f"{name} {rate:>13,.0f}" for name, rate in rates.items()), sep="   ")


if __name__ == "__main__":
    main(tyro.cli(Options))
