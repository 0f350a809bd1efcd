"""Who computes gradients: torch's autograd, or somebody with the derivatives written out (docs/fast_learner.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from freerun.algorithms.learners.compiled_kernel import Kernel, compiled_kernel
from freerun.core import UserError

Learner = Literal["auto", "fast", "numpy", "torch"]
WIDEST_COMPILED = 256
"""Wider layers are left to numpy: their time goes to products, for which its BLAS is as fast or faster."""


def uses_fast_learner(
    learner: Learner,
    device: str,
    network: str | None = None,
    has_memory: bool = False,
    device_types: Sequence[str] = ("cpu",),
) -> bool:
    """True if gradients are written out: for MLPs, unless torch was asked for.

    `network` names a network that is no MLP, where the algorithm has one; `device_types` are those for which it has
    gradients written out.
    """
    can_be_fast = device.partition(":")[0] in (("cpu",) if learner == "numpy" else device_types)
    must_be_fast = learner in ("fast", "numpy")
    if must_be_fast and network is not None:
        raise UserError(f"--learner {learner} is for MLPs: leave it out for images and networks of your own")
    if must_be_fast and has_memory:
        raise UserError(f"--learner {learner} is for MLPs without a memory: leave it out with --memory")
    if must_be_fast and not can_be_fast:
        raise UserError(f"--learner {learner} computes on the CPU: give --device cpu, or leave --learner out")
    return learner != "torch" and network is None and not has_memory and can_be_fast


def kernel_for(learner: Learner, hidden_sizes: Sequence[int]) -> Kernel | None:
    """The compiled kernel, for an algorithm whose gradients are written out in C too; None where numpy computes."""
    if learner == "numpy" or max(hidden_sizes, default=0) > WIDEST_COMPILED:
        return None
    return compiled_kernel()


def learner_words(is_fast: bool) -> str:
    """Who computes gradients, for the header of a run."""
    return "fast learner" if is_fast else "torch learner"
