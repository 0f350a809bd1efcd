"""freerun trains reinforcement-learning agents without ever making fast workers wait for slow ones.

    result = freerun.train("CartPole-v1", total_steps=100_000, num_workers=4)
    policy = freerun.load_policy(result.run_dir)

`freerun.resume(run_dir)` goes on with a run that was stopped or killed. On the command line: `freerun --help`.
"""

import importlib
from typing import Any

from freerun.version import VERSION as __version__

__all__ = ["Result", "__version__", "load_policy", "resume", "train"]

_HOMES = {
    "Result": "freerun.experiment",
    "load_policy": "freerun.evaluation",
    "resume": "freerun.python_api",
    "train": "freerun.python_api",
}
"""Imported when they are asked for: worker processes import this package and must stay light."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'freerun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
