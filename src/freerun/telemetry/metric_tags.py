"""Names metrics as RSL-RL names them, for its console block and for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping

from freerun.core import Metrics

RSL_RL_TAGS = {
    "steps_per_second": "Perf/total_fps",
    "return_mean": "Train/mean_reward",
    "length_mean": "Train/mean_episode_length",
    "policy_loss": "Loss/surrogate",
    "entropy": "Loss/entropy",
    "learning_rate": "Loss/learning_rate",
    "action_std": "Policy/mean_std",
}
OWN_PREFIX = "Freerun/"
"""The prefix of metrics that RSL-RL does not have."""


def rsl_rl_tags(metrics: Mapping[str, float]) -> Metrics:
    """Return the record of an update under RSL-RL's tags. Names with a / come from a simulator and stay as they are.

    RSL-RL collects and learns in turns, so its two times add up to an iteration. Here both may happen at the same time:
    so `collection_time` is how long the learner has waited for steps, and the two times still add up to an iteration.
    """
    # RSL-RL reports seconds of an iteration; a share of the interval times its length is the same.
    tags = {
        "Perf/collection_time": metrics["learner_waiting_share"] * metrics["interval_seconds"],
        "Perf/learning_time": metrics["learner_updating_share"] * metrics["interval_seconds"],
    }
    return tags | {_tag(name): value for name, value in metrics.items()}


def finite_tags(metrics: Mapping[str, float]) -> Metrics:
    """Return the same tags without infinite values and NaN, which charts cannot show."""
    return {tag: value for tag, value in rsl_rl_tags(metrics).items() if math.isfinite(value)}


def _tag(name: str) -> str:
    if name in RSL_RL_TAGS:
        return RSL_RL_TAGS[name]
    # value_loss becomes Loss/value, as RSL-RL would name it.
    if name.endswith("_loss"):
        return f"Loss/{name.removesuffix('_loss')}"
    return name if "/" in name else OWN_PREFIX + name
