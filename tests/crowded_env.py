"""An environment of which only so many can be there at once: the next one fails as if memory had run out."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Crowded(gymnasium.Env[Any, Any]):
    """Each holds one of `most` locks in a folder from its first reset until it is closed, or its process ends."""

    def __init__(self, folder: str, most: int = 1, step_seconds: float = 0.0):
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._places = [Path(folder) / str(place) for place in range(most)]
        self._step_seconds = step_seconds
        self._place: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._place is None:
            self._place = self._claim()
        self._steps_left = 10
        return np.zeros(1, np.float32), {}

    def _claim(self) -> Any:
        for path in self._places:
            file = path.open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                return file
        raise MemoryError("no room for another environment")

    def close(self) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_seconds)
        self._steps_left -= 1
        return np.zeros(1, np.float32), 1.0, False, self._steps_left == 0, {}
