"""Averages what a simulator logs about itself: `extras["log"]` of Isaac Lab and RSL-RL."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from typing import Any

import torch

from freerun.core import Metrics

KEYS = ("log", "episode")
"""The keys under which simulators put their log. Older RSL-RL environments use the second."""


class StepLog:
    """Means of all logged values since the last `read`.

    The simulator's thread adds, the learner's thread reads. Sums stay on the device until they are read, because a
    transfer at every step would make the steps wait.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor | float, int]] = {}
        self._stream: torch.cuda.Stream | None = None
        """The simulator's CUDA stream, on which the sums are computed. The learner reads from another one."""
        self._lock = threading.Lock()

    @staticmethod
    def clear(extras: MutableMapping[str, Any]) -> None:
        """Call before a step. Simulators reuse one dict, so old entries would be taken for new ones after the step.

        The dict itself stays, because some tasks expect it to be there.
        """
        for key in KEYS:
            if isinstance(entries := extras.get(key), MutableMapping):
                entries.clear()

    def add(self, extras: MutableMapping[str, Any]) -> None:
        """Call after a step."""
        with self._lock:
            for key in KEYS:
                for name, value in (extras.get(key) or {}).items():
                    self._add(name, value)

    def _add(self, name: str, value: torch.Tensor | float) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                self._stream = torch.cuda.current_stream(value.device)
            value = value.detach().float().mean()
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)

    def read(self) -> Metrics:
        with self._lock:
            # Only swapped under the lock: reading the device may take long, and the simulator must not wait for it.
            sums, self._sums = self._sums, {}
        if self._stream is not None:
            self._stream.synchronize()  # the sums may still be in the queue of the simulator's stream
        means = {name: float(total) / count for name, (total, count) in sums.items()}
        return {name if "/" in name else f"Episode/{name}": mean for name, mean in means.items()}
