"""A gradient step done thousands of times: on a GPU recorded once as a CUDA graph, then replayed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from freerun.core import Acceleration

Function = TypeVar("Function", bound=Callable[..., Any])
WARM_UP_CALLS = 3
"""Libraries set themselves up during the first calls, which cannot be recorded. They count as steps all the same."""


def choose(acceleration: Acceleration, device: torch.device) -> Acceleration:
    """On a GPU a small step is bound by the launching of its kernels: record it, and fuse them where that works."""
    if acceleration != "auto":
        return acceleration
    if device.type != "cuda":
        return "none"
    can_compile = importlib.util.find_spec("triton") is not None and (shutil.which("cc") or shutil.which("gcc"))
    return "compile" if can_compile else "graph"


def fused(function: Function, acceleration: Acceleration) -> Function:
    """The same function in fewer kernels."""
    if acceleration != "compile":
        return function
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    return torch.compile(function, fullgraph=True, dynamic=False)  # type: ignore[return-value]


_one_at_a_time = threading.Lock()
"""To record, torch empties its cache of memory, which it cannot while another thread records."""


class Repeated:
    """A step without arguments and results: it reads and writes tensors that stay where they are."""

    def __init__(
        self,
        step: Callable[[], None],
        device: torch.device,
        generators: Sequence[torch.Generator],
        acceleration: Acceleration,
    ):
        self._step = step
        self._device = device
        self._generators = generators
        self._captures = device.type == "cuda" and acceleration != "none"
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int) -> None:
        if not self._captures:
            for _ in range(times):
                self._step()
            return
        if self._graph is None and times > 0:
            times -= self._warm_up(min(times, WARM_UP_CALLS))
            self._record()
        if self._graph is not None:
            for _ in range(times):
                self._graph.replay()

    def forget(self) -> None:
        """Record anew: the tensors have moved."""
        self._graph = None

    def _warm_up(self, times: int) -> int:
        here = torch.cuda.current_stream(self._device)
        side = self._beside(here)
        with torch.cuda.stream(side):
            for _ in range(times):
                self._step()
        here.wait_stream(side)
        return times

    def _beside(self, here: torch.cuda.Stream) -> torch.cuda.Stream:
        """Another stream, as urgent: what is recorded on it stays so."""
        side = torch.cuda.Stream(self._device, priority=here.priority)  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        return side

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        side = self._beside(torch.cuda.current_stream(self._device))
        # Other threads may go on with their own work on the device meanwhile.
        with _one_at_a_time, torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph


class Recorded:
    """A function of tensors whose shapes stay: its results lie where the next call puts its own."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], device: torch.device, acceleration: Acceleration):
        self._function = function
        self._device = device
        self._captures = device.type == "cuda" and acceleration != "none"
        self._given: list[Tensor] = []
        self._results: list[Tensor] = []

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        if not self._captures:
            return self._function(*given)
        if [part.shape for part in self._given] != [part.shape for part in given]:
            self._given = [part.clone() for part in given]
            self._results = [result.clone() for result in self._function(*self._given)]
            self._run = Repeated(self._step, self._device, (), "graph")
        for kept, part in zip(self._given, given, strict=True):
            kept.copy_(part)
        self._run(1)
        return self._results

    def _step(self) -> None:
        for kept, result in zip(self._results, self._function(*self._given), strict=True):
            kept.copy_(result)
