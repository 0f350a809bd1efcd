"""freerun trains reinforcement-learning agents without ever making fast workers wait for slow ones."""

from typing import Any

from freerun.version import VERSION as __version__

__all__ = ["Result", "__version__", "load_policy", "resume", "train"]


def __getattr__(name: str) -> Any:
    # Lazy, because worker processes import this package and must stay light.
    if name == "train":
        from freerun.python_api import train

        return train
    if name == "resume":
        from freerun.python_api import resume

        return resume
    if name == "Result":
        from freerun.experiment import Result

        return Result
    if name == "load_policy":
        from freerun.evaluation import load_policy

        return load_policy
    raise AttributeError(f"module 'freerun' has no attribute {name!r}")
