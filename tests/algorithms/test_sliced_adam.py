"""Adam on slices of a buffer takes the steps of torch's Adam on the whole buffer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freerun.algorithms.learners.sliced_adam import SlicedAdam, take_sliced_step

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def weights_of(size: int, device: str = "cpu") -> nn.Parameter:
    weights = nn.Parameter(torch.linspace(-1, 1, size, device=device))
    weights.grad = torch.zeros_like(weights)
    return weights


def gradients(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(5)]


@pytest.mark.parametrize("size", [1, 35, 36, 1000, 100_001])
def test_slices_end_at_the_weights_and_moments_of_the_whole(size: int) -> None:
    sliced, whole = weights_of(size), weights_of(size)
    optimizer = torch.optim.Adam([whole], 1e-2, eps=1e-5, fused=True)
    state: dict[str, Any] = {}
    for gradient in gradients(size):
        for weights in (sliced, whole):
            assert weights.grad is not None
            weights.grad.copy_(gradient)
        take_sliced_step(sliced, state, optimizer.param_groups[0], found_inf=None)
        optimizer.step()
    assert torch.equal(sliced, whole)
    reference = optimizer.state[whole]
    assert state.keys() == reference.keys()
    for name, value in reference.items():
        assert torch.equal(state[name], value), name


def test_a_step_that_must_not_be_taken_changes_nothing() -> None:
    weights, state = weights_of(100), dict[str, Any]()
    group = torch.optim.Adam([weights], 1e-2, fused=True).param_groups[0]
    assert weights.grad is not None
    weights.grad.fill_(1.0)
    take_sliced_step(weights, state, group, torch.zeros(()))
    before = [tensor.clone() for tensor in (weights, *state.values())]
    weights.grad.fill_(torch.nan)
    take_sliced_step(weights, state, group, torch.ones(()))
    for tensor, earlier in zip((weights, *state.values()), before, strict=True):
        assert torch.equal(tensor, earlier)
    assert state["step"] == 1


def test_a_loaded_learning_rate_goes_into_the_tensor_that_a_captured_step_reads() -> None:
    saved = SlicedAdam(weights_of(10), torch.tensor(0.5))
    optimizer = SlicedAdam(weights_of(10), rate := torch.tensor(0.1))
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5
    optimizer.set_learning_rate(0.25)
    assert rate == 0.25
    as_number = SlicedAdam(weights_of(10), 0.1)
    as_number.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert as_number.param_groups[0]["lr"] == 0.5


@NEEDS_GPU
@pytest.mark.parametrize("size", [1, 1000, 100_001])
def test_a_gpu_goes_on_with_the_state_of_torchs_adam(size: int) -> None:
    """A checkpoint of either may be resumed by the other."""
    first = weights_of(size, "cuda")
    torchs = torch.optim.Adam([first], 1e-2, fused=True, capturable=True)
    *most, last = gradients(size)
    for gradient in most:
        assert first.grad is not None
        first.grad.copy_(gradient)
        torchs.step()
    second = nn.Parameter(first.detach().clone())
    sliced = SlicedAdam(second, 1e-2)
    sliced.load_state_dict(copy.deepcopy(torchs.state_dict()))  # torch keeps the tensors that it is given
    for weights, optimizer in ((first, torchs), (second, sliced)):
        weights.grad = last.cuda()
        optimizer.step()
    assert torch.equal(first, second)
    assert sliced.state[second]["step"] == 5
