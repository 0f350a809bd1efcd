"""The GRU whose gradient is written out is that of torch, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from freerun.algorithms.policies.gru_sequence import GRUSequence


@pytest.mark.parametrize(("num_steps", "num_rows"), [(1, 1), (1, 5), (6, 1), (9, 4)])
def test_outputs_and_gradients_are_those_of_torch(num_steps: int, num_rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.GRU(3, 5)
    inputs = torch.randn(num_steps, num_rows, 3, requires_grad=True)
    memory = torch.randn(num_rows, 5, requires_grad=True)
    wanted = (inputs, memory, *layer.parameters())
    # Weighted by random numbers, so that no two steps have the same gradient.
    weight = torch.randn(num_steps, num_rows, 5)
    expected, _ = layer(inputs, memory[None])
    expected_gradients = torch.autograd.grad((expected * weight).sum(), wanted)
    found = GRUSequence.apply(inputs, memory, *layer.parameters())  # type: ignore[no-untyped-call]
    gradients = torch.autograd.grad((found * weight).sum(), wanted)
    torch.testing.assert_close(found, expected)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


def test_large_numbers_stay_finite() -> None:
    """Gates that are saturated have no slope, and no overflow."""
    layer = nn.GRU(2, 3)
    inputs = torch.full((4, 2, 2), 1e4, requires_grad=True)
    output = GRUSequence.apply(inputs, torch.zeros(2, 3), *layer.parameters())  # type: ignore[no-untyped-call]
    (gradient,) = torch.autograd.grad(output.sum(), [inputs])
    assert output.isfinite().all()
    assert gradient.isfinite().all()
