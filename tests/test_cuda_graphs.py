"""Recorded steps, on a GPU and on a stand-in for one, and fused functions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from freerun.cuda_graphs import STEPS_PER_GRAPH, WARM_UP_CALLS, GraphedStep, fused

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Scaled:
    def __init__(self, factor: float):
        self.factor = factor

    @torch.no_grad()
    def times(self, value: Tensor) -> Tensor:
        return value * self.factor


def test_more_objects_than_torch_compiles_one_piece_of_code_for() -> None:
    """As in a sweep, where each trial of a process has an agent of its own."""
    for factor in range(9):  # torch refuses the ninth
        assert fused(Scaled(factor + 0.5).times, "compile")(torch.ones(3)).tolist() == 3 * [factor + 0.5]


class Stream:
    """Knows which streams it has waited for."""

    def __init__(self, *_: Any, **__: Any):
        self.waited_for: list[Stream] = []
        self.priority = 0

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Graph:
    """Counts its replays. Where it was captured, the step only prepares work, so a replay calls no Python."""

    captured: list[tuple[Graph, Stream]]
    is_capturing = False
    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Torch's CUDA, as far as steps are recorded with it; returns the current stream. This machine may have no GPU."""
    current = Stream()
    Graph.captured = []

    @contextlib.contextmanager
    def capture(graph: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        Graph.captured.append((graph, stream))
        Graph.is_capturing = True
        yield
        Graph.is_capturing = False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    return current


def recorded(step: Callable[[], None]) -> GraphedStep:
    return GraphedStep(step, torch.device("cuda"), (), "graph")


def test_a_step_that_is_wanted_one_at_a_time_is_recorded(stand_in: Stream) -> None:
    called: list[int] = []
    step = recorded(lambda: called.append(1))
    for _ in range(20):
        step(1)
    assert len(called) == 2, "once to warm up, once to be recorded"
    assert [graph.num_replays for graph, _ in Graph.captured] == [19]
    step.forget()
    step(1)
    step(1)
    assert len(called) == 4
    assert len(Graph.captured) == 2


def test_many_steps_are_recorded_in_tens(stand_in: Stream) -> None:
    called: list[int] = []
    recorded(lambda: called.append(1))(WARM_UP_CALLS + 3 * STEPS_PER_GRAPH + 2)
    assert len(called) == WARM_UP_CALLS + STEPS_PER_GRAPH + 1
    assert [graph.num_replays for graph, _ in Graph.captured] == [3, 2]


def test_nothing_is_replayed_before_the_capture_has_ended(stand_in: Stream) -> None:
    """A capture sets the positions of random generators on its own stream, a replay on the current one."""
    recorded(lambda: None)(WARM_UP_CALLS + 1)
    ((_, side),) = Graph.captured
    assert stand_in.waited_for[-1] is side


def test_a_thread_takes_a_step_before_it_captures_one(stand_in: Stream) -> None:
    """As with MBPO, whose first rollout is the learner's and whose later ones are a thread's. cuBLAS makes a handle
    for each thread, which it cannot do during a capture."""
    calls: list[tuple[bool, bool]] = []
    step = recorded(lambda: calls.append((threading.current_thread() is threading.main_thread(), Graph.is_capturing)))
    step(1)
    with ThreadPoolExecutor(1) as executor:
        for _ in range(3):
            executor.submit(step, 1).result()
    step(1)
    assert calls == [(True, False), (False, False), (False, True)]
    assert [graph.num_replays for graph, _ in Graph.captured] == [3]


@NEEDS_GPU
def test_a_step_that_one_thread_has_warmed_up_is_captured_in_another() -> None:
    matrix, product = torch.rand(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")

    def multiply() -> None:
        product.add_(matrix @ matrix)

    step = GraphedStep(multiply, torch.device("cuda"), (), "graph")
    step(1)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as executor:
        for _ in range(3):
            executor.submit(step, 1).result()
    torch.testing.assert_close(product, 4 * (matrix @ matrix))


@NEEDS_GPU
def test_a_recorded_step_draws_what_an_eager_one_draws() -> None:
    drawn = []
    for acceleration in ("none", "graph"):
        generator = torch.Generator("cuda").manual_seed(7)
        values, place = torch.zeros(40, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")

        def draw(values: Tensor = values, place: Tensor = place, generator: torch.Generator = generator) -> None:
            values.index_copy_(0, place[None], torch.rand(1, device="cuda", generator=generator))
            place.add_(1)

        step = GraphedStep(draw, torch.device("cuda"), (generator,), acceleration)
        for times in (1, 1, 1, 25, 12):
            step(times)
        drawn.append(values.tolist())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 40
