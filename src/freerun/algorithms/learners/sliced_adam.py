"""Adam over one flat buffer of weights, spread over a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn

NUM_SLICES = 36
"""As many tensors as torch's fused kernel takes in one launch."""


class SlicedAdam(torch.optim.Adam):
    """Torch's Adam with the same state and the same numbers. On a GPU its kernel gets the buffer in slices.

    One tensor of 140,000 weights is three blocks of threads for that kernel, which has a block for every 65,536
    numbers, and then takes a fifth of a captured gradient step of SAC. Slices are one block each.
    """

    def __init__(self, weights: nn.Parameter, learning_rate: float | Tensor, eps: float = 1e-8):
        """`weights` is one flat buffer with its gradient (`flatten_parameters`)."""
        # capturable keeps Adam's step counter on the device, where a captured graph can advance it.
        self._is_sliced = weights.device.type == "cuda"
        super().__init__([weights], learning_rate, eps=eps, fused=True, capturable=self._is_sliced)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Change the number. If it lies in a tensor, which a captured gradient step reads, it stays the same tensor."""
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without replacing the learning rate's tensor.

        Torch moves Adam's moments to the device of the weights, but leaves the learning rate where the checkpoint has
        it: on the CPU. A captured gradient step would read it only once, while it is captured, and annealing would have
        no effect. So the value goes into the tensor that the optimiser was made with.
        """
        learning_rate = self.param_groups[0]["lr"]
        super().load_state_dict(state_dict)
        (group,) = self.param_groups
        loaded, group["lr"] = float(group["lr"]), learning_rate
        self.set_learning_rate(loaded)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> float | None:
        """Take a step, unless `found_inf` is set and 1, as torch's GradScaler sets it."""
        if not self._is_sliced:
            result: float | None = super().step(closure)
            return result
        (group,) = self.param_groups
        (weights,) = group["params"]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        take_sliced_step(weights, self.state[weights], group, found_inf)
        return None


def take_sliced_step(
    weights: nn.Parameter, state: dict[str, Any], group: dict[str, Any], found_inf: Tensor | None
) -> None:
    if not state:
        state |= {"step": torch.zeros((), device=weights.device)}
        state |= {name: torch.zeros_like(weights) for name in ("exp_avg", "exp_avg_sq")}
    assert weights.grad is not None
    whole = (weights.detach(), weights.grad, state["exp_avg"], state["exp_avg_sq"])
    # Multiples of 32, because the kernel reads four numbers at a time where slices begin at multiples of 16 bytes.
    size = -(-weights.numel() // NUM_SLICES)
    sliced = [list(tensor.split(size + -size % 32)) for tensor in whole]
    state["step"] += 1
    torch._fused_adam_(  # type: ignore[call-overload]  # whose stub wants a lr of one type
        *sliced,
        [],
        [state["step"]] * len(sliced[0]),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )
    if found_inf is not None:
        state["step"] -= found_inf  # the step was not taken
