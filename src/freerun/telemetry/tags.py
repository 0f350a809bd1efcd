"""The names under which users of RSL-RL know what a run reports, for its console block and for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping

from freerun.core import Metrics

KNOWN = {
    "steps_per_second": "Perf/total_fps",
    "return_mean": "Train/mean_reward",
    "length_mean": "Train/mean_episode_length",
    "policy_loss": "Loss/surrogate",
    "entropy": "Loss/entropy",
    "learning_rate": "Loss/learning_rate",
    "action_std": "Policy/mean_std",
}
OWN = "Freerun/"
"""For what RSL-RL has no word for."""


def rsl_rl_tags(metrics: Mapping[str, float]) -> Metrics:
    """The record of an update by RSL-RL's tags; names with a / are a simulator's own and stay as they are.

    Collecting and learning may go on at the same time here: `collection_time` is how long the learner has waited for
    steps, so that it and `learning_time` make up an iteration as they do there.
    """
    tags = {
        "Perf/collection_time": metrics["learner_waiting_share"] * metrics["interval_seconds"],
        "Perf/learning_time": metrics["learner_updating_share"] * metrics["interval_seconds"],
    }
    return tags | {_tag(name): value for name, value in metrics.items()}


def finite_tags(metrics: Mapping[str, float]) -> Metrics:
    """Those that a chart can show."""
    return {tag: value for tag, value in rsl_rl_tags(metrics).items() if math.isfinite(value)}


def _tag(name: str) -> str:
    if name in KNOWN:
        return KNOWN[name]
    if name.endswith("_loss"):
        return f"Loss/{name.removesuffix('_loss')}"
    return name if "/" in name else OWN + name
