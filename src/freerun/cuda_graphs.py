"""CUDA graphs: work that is done thousands of times is captured once on a GPU and then replayed.

A gradient step of small networks takes less time on the GPU than the launching of its kernels from Python. Replaying a
graph launches all kernels at once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from freerun.core import Acceleration

Function = TypeVar("Function", bound=Callable[..., Any])
WARM_UP_CALLS = 3
"""Libraries initialise themselves during the first calls of a thread, which cannot be captured: cuBLAS has a handle for
each thread. These calls count as steps too."""
STEPS_PER_GRAPH = 10
"""Steps in the graph that is replayed where many are wanted. Between two graphs the GPU does nothing for some 20
microseconds, which is a tenth of a small gradient step."""


def resolve_acceleration(acceleration: Acceleration, device: torch.device) -> Acceleration:
    """Resolve `auto`: on a GPU capture graphs, and fuse kernels where a compiler is installed."""
    if acceleration != "auto":
        return acceleration
    if device.type != "cuda":
        return "none"
    can_compile = importlib.util.find_spec("triton") is not None and (shutil.which("cc") or shutil.which("gcc"))
    return "compile" if can_compile else "graph"


def fused(function: Function, acceleration: Acceleration) -> Function:
    """The same function in fewer kernels, where `acceleration` is `compile`."""
    if acceleration != "compile":
        return function
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    # Torch refuses to compile a piece of code more than eight times, whichever objects its methods belong to, so that
    # the ninth run of a sweep within one process would fail. A copy of the code is counted by itself.
    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True, dynamic=False)  # type: ignore[return-value]


def waits_for_device(function: Callable[[], object]) -> bool:
    """True if the host waits for the device somewhere in a function, so that it cannot be captured.

    Torch checks this for the whole process, so nothing else may use the device meanwhile.
    """
    mode_before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # Torch warns that it may miss some waits. Where warnings are errors, this one comes after the mode was set.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        function()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode_before)
    return False


_capture_lock = threading.Lock()
"""Held during a capture: it empties torch's memory cache, which fails while another thread captures."""


class GraphedStep:
    """A step without arguments and results. It reads and writes tensors that must stay in place."""

    def __init__(
        self,
        step: Callable[[], None],
        device: torch.device,
        generators: Sequence[torch.Generator],
        acceleration: Acceleration,
    ):
        """`generators` are all those that the step draws from: a graph must know them to advance them."""
        self._step = step
        self._device = device
        self._generators = generators
        self._captures = device.type == "cuda" and acceleration != "none"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by how many steps they take
        self._warm_thread: threading.Thread | None = None

    def __call__(self, times: int) -> None:
        """Take the step this many times."""
        if not self._captures:
            for _ in range(times):
                self._step()
            return
        for num_steps in (STEPS_PER_GRAPH, 1):
            while times >= num_steps:
                if num_steps in self._graphs:
                    self._graphs[num_steps].replay()
                    times -= num_steps
                elif self._warm_thread is threading.current_thread():
                    self._graphs[num_steps] = self._capture(num_steps)
                else:
                    # One step is enough, for callers that never want more at a time.
                    times -= self._warm_up(min(times, WARM_UP_CALLS))
                    self._warm_thread = threading.current_thread()

    def forget(self) -> None:
        """Capture again at the next call, because tensors have been replaced."""
        self._graphs.clear()
        self._warm_thread = None

    def _warm_up(self, times: int) -> int:
        # As torch asks for: on another stream than the current one, with both waiting for each other.
        current = torch.cuda.current_stream(self._device)
        side = self._side_stream(current)
        with torch.cuda.stream(side):
            for _ in range(times):
                self._step()
        current.wait_stream(side)
        return times

    def _side_stream(self, current: torch.cuda.Stream) -> torch.cuda.Stream:
        """Another stream of the same priority, which a captured graph inherits."""
        side = torch.cuda.Stream(self._device, priority=current.priority)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        return side

    def _capture(self, num_steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        current = torch.cuda.current_stream(self._device)
        side = self._side_stream(current)
        # thread_local: other threads may use the device meanwhile (a simulator, or another stage of MBPO).
        with _capture_lock, torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            for _ in range(num_steps):
                self._step()
        # A capture begins by setting the generators' positions to zero on its own stream, and a replay sets them to
        # where they are. Without waiting, a busy GPU could do the former after the latter, and draw wrong numbers.
        current.wait_stream(side)
        return graph


class GraphedFunction:
    """A function of tensors whose shapes rarely change. The next call overwrites its results."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], device: torch.device, acceleration: Acceleration):
        self._function = function
        self._device = device
        self._captures = device.type == "cuda" and acceleration != "none"
        self._arguments: list[Tensor] = []
        self._results: list[Tensor] = []

    def __call__(self, *arguments: Tensor) -> Sequence[Tensor]:
        if not self._captures:
            return self._function(*arguments)
        if [buffer.shape for buffer in self._arguments] != [argument.shape for argument in arguments]:
            self._arguments = [argument.clone() for argument in arguments]
            # Called once without a graph, to learn the shapes of the results.
            self._results = [result.clone() for result in self._function(*self._arguments)]
            self._graphed_step = GraphedStep(self._step, self._device, (), "graph")
        for buffer, argument in zip(self._arguments, arguments, strict=True):
            buffer.copy_(argument)
        self._graphed_step(1)
        return self._results

    def _step(self) -> None:
        for buffer, result in zip(self._results, self._function(*self._arguments), strict=True):
            buffer.copy_(result)
