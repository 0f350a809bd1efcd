"""freerun trains reinforcement-learning agents without ever making fast workers wait for slow ones."""

from typing import Any

from freerun.version import VERSION as __version__

__all__ = ["Result", "__version__", "load_policy", "resume", "train"]


def __getattr__(name: str) -> Any:
    # Lazy, because worker processes import this package and must stay light.
    if name == "train":
        from freerun.experiment import train_from_python

        return train_from_python
    if name == "resume":
        from freerun.experiment import resume_from_python

        return resume_from_python
    if name == "Result":
        from freerun.experiment import Result

        return Result
    if name == "load_policy":
        from freerun.evaluation import load_policy

        return load_policy
    raise AttributeError(f"module 'freerun' has no attribute {name!r}")
