"""The state of a run in a checkpoint: everything that it takes to continue from there, and how it is restored."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from freerun.core import Algorithm, Counts, StartPoint, UserError
from freerun.persistence.files import LineFile
from freerun.persistence.state_codec import check_fit, upgrade_algorithm_state
from freerun.run.run_parts import RunParts
from freerun.telemetry.ledger import Ledger
from freerun.version import VERSION

logger = logging.getLogger("freerun")


def capture(
    parts: RunParts, settings: Mapping[str, Any], lines: Mapping[str, LineFile], metrics: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the state of the run between two updates; None if it is not worth saving."""
    import torch

    if not np.isfinite(parts.algorithm.policy.weights).all():
        logger.warning("weights are not finite any more: no checkpoint is written, the last good one stays")
        return None
    # Evaluations decide which checkpoint is the best; without them, the return in training does.
    score = metrics.get("eval_return", metrics.get("return_mean", math.nan))
    return {
        "freerun": VERSION,
        "config": settings,
        "update": parts.ledger.version,
        "score": score if math.isfinite(score) else None,
        "wall_seconds": metrics.get("wall_seconds", parts.ledger.seconds_before),
        "lines": {name: file.mark() for name, file in lines.items()},
        "counts": dataclasses.asdict(parts.collector.counts()),
        "ledger": parts.ledger.state_dict(),
        "algorithm": parts.algorithm.state_dict(),
        "torch_rng": torch.get_rng_state(),
    }


def restore(state: Mapping[str, Any], algorithm: Algorithm, ledger: Ledger) -> StartPoint:
    """Put the algorithm and the ledger into this state, and return where collecting continues."""
    import torch

    try:
        algorithm_state = upgrade_algorithm_state(state["algorithm"])
        # Check names and shapes first: the message then says which part does not fit, and nothing is half loaded.
        check_fit(algorithm_state, algorithm.state_dict())
        algorithm.load_state_dict(algorithm_state)
        torch.set_rng_state(state["torch_rng"])
        ledger.load_state_dict(state["ledger"])
        ledger.seconds_before = float(state["wall_seconds"])
        return ledger.start_point(Counts(**state["counts"]))
    # A checkpoint may come from anywhere: whatever its content breaks, the user gets a sentence.
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"the checkpoint does not fit this run: {error}") from None


def file_mark(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return where a file of lines ended when the checkpoint was written. A resumed run cuts it off there."""
    try:
        mark = state["lines"][name]
        if isinstance(mark["bytes"], int) and mark["bytes"] >= 0 and isinstance(mark["sha256"], str):
            return dict(mark)
    except (LookupError, TypeError):
        pass
    raise UserError(f"the checkpoint does not fit this run: it does not say where {name}.jsonl ended")
