"""Fused functions (the captured graphs themselves are tested with the algorithms that use them)."""

from __future__ import annotations

import torch
from torch import Tensor

from freerun.cuda_graphs import fused


class Scaled:
    def __init__(self, factor: float):
        self.factor = factor

    @torch.no_grad()
    def times(self, value: Tensor) -> Tensor:
        return value * self.factor


def test_more_objects_than_torch_compiles_one_piece_of_code_for() -> None:
    """As in a sweep, where each trial of a process has an agent of its own."""
    objects = [Scaled(number + 0.5) for number in range(torch._dynamo.config.recompile_limit + 1)]
    for each in objects:
        assert fused(each.times, "compile")(torch.ones(3)).tolist() == 3 * [each.factor]
    assert len(objects) == 9
