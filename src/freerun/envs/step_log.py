"""What a simulator logs of itself (`extras["log"]` of Isaac Lab and RSL-RL), averaged until somebody asks."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from typing import Any

import torch

from freerun.core import Metrics

KEYS = ("log", "episode")
"""Where simulators put it; RSL-RL's older ones under the second."""


class StepLog:
    """Means since the last call of `read`, which may come from the learner's thread.

    Nothing is asked of the device before that, so that logging does not hold up the steps.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int]] = {}
        self._stream: torch.cuda.Stream | None = None
        """On which they are added up; the learner has another."""
        self._lock = threading.Lock()

    @staticmethod
    def clear(extras: MutableMapping[str, Any]) -> None:
        """Before a step: simulators write into the same dict again and again, so what is found later must be new.

        The dict itself stays, as some tasks take it for granted.
        """
        for key in KEYS:
            if isinstance(entries := extras.get(key), MutableMapping):
                entries.clear()

    def add(self, extras: MutableMapping[str, Any]) -> None:
        """After a step."""
        with self._lock:
            for key in KEYS:
                for name, value in (extras.get(key) or {}).items():
                    self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                self._stream = torch.cuda.current_stream(value.device)
            value = value.detach().float().mean()
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)

    def read(self) -> Metrics:
        with self._lock:
            sums, self._sums = self._sums, {}
        if self._stream is not None:
            self._stream.synchronize()
        means = {name: float(total) / count for name, (total, count) in sums.items()}
        return {name if "/" in name else f"Episode/{name}": mean for name, mean in means.items()}
