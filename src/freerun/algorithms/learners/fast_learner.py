"""Who computes gradients: torch's autograd, or numpy with the derivatives written out (docs/fast_learner.md)."""

from __future__ import annotations

from typing import Literal

from freerun.algorithms.learners.compiled_kernel import Kernel, compiled_kernel
from freerun.core import UserError

Learner = Literal["auto", "fast", "numpy", "torch"]


def uses_fast_learner(learner: Learner, device: str, network: str | None = None, has_memory: bool = False) -> bool:
    """True if gradients are written out: for MLPs, on a CPU, unless torch was asked for.

    `network` names a network that is no MLP, where the algorithm has one.
    """
    must_be_fast = learner in ("fast", "numpy")
    if must_be_fast and network is not None:
        raise UserError(f"--learner {learner} is for MLPs: leave it out for images and networks of your own")
    if must_be_fast and has_memory:
        raise UserError(f"--learner {learner} is for MLPs without a memory: leave it out with --memory")
    if must_be_fast and device != "cpu":
        raise UserError(f"--learner {learner} computes on the CPU: give --device cpu, or leave --learner out")
    return learner != "torch" and network is None and not has_memory and device == "cpu"


def learner_words(learner: Learner, device: str, network: str | None = None, has_memory: bool = False) -> str:
    """Who computes gradients, for the header of a run."""
    return "fast learner" if uses_fast_learner(learner, device, network, has_memory) else "torch learner"


def kernel_for(learner: Learner) -> Kernel | None:
    """The compiled kernel, where gradients are written out and the algorithm has them in C; None if numpy computes."""
    return None if learner == "numpy" else compiled_kernel()
