"""freerun trains reinforcement-learning agents without ever making fast workers wait for slow ones.

    result = freerun.train("CartPole-v1", total_steps=100_000, num_workers=4)
    policy = freerun.load_policy(result.run_dir)
    action = policy.predict(observation)
    print(freerun.evaluate(result.run_dir, episodes=20))

`freerun.resume(run_dir)` continues a run that was stopped or killed. On the command line: `freerun --help`.
"""

import importlib
from typing import Any

from freerun.version import VERSION as __version__

__all__ = [
    "Evaluation",
    "PruneRun",
    "Result",
    "StopRun",
    "SweepResult",
    "TrainedPolicy",
    "Update",
    "__version__",
    "evaluate",
    "export",
    "load_policy",
    "resume",
    "resume_sweep",
    "search_workflows",
    "sweep",
    "train",
]

_HOMES = {
    "Evaluation": "freerun.run.evaluation",
    "PruneRun": "freerun.core",
    "Result": "freerun.experiment",
    "StopRun": "freerun.core",
    "SweepResult": "freerun.tools.sweep.sweep",
    "TrainedPolicy": "freerun.run.trained_policy",
    "Update": "freerun.run.update_hooks",
    "evaluate": "freerun.run.evaluation",
    "export": "freerun.run.export",
    "load_policy": "freerun.run.policy_loading",
    "resume": "freerun.tools.api",
    "resume_sweep": "freerun.tools.api",
    "sweep": "freerun.tools.api",
    "search_workflows": "freerun.tools.workflow_search.order_search",
    "train": "freerun.tools.api",
}
"""Where each name lives. It is imported at first use, because worker processes import this package and must stay
light."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'freerun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
