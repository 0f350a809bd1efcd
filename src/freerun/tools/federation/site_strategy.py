"""A strategy of Flower's that looks at what sites send before it is put together, and merges their moments."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    Strategy,
)

from freerun.algorithms.policies.running_moments import RunningMoments
from freerun.core import LearnerFailure, UserError
from freerun.tools.federation import flower_records as records
from freerun.tools.federation import shared_state
from freerun.tools.federation.federation_options import FederationOptions
from freerun.tools.federation.moment_merging import merge_by_count, merge_by_median
from freerun.tools.federation.shared_state import SharedState

logger = logging.getLogger("freerun")

ROBUST = (FedMedian,)
"""Strategies that a minority of sites cannot move: their moments are merged in the same way."""


def make_strategy(options: FederationOptions, num_sites: int) -> Any:
    """Return Flower's strategy, with its own differential privacy around it."""
    common: dict[str, Any] = {
        "min_train_nodes": num_sites,
        "min_available_nodes": num_sites,
        "fraction_evaluate": 0.0,  # `freerun eval` evaluates; see docs/federated.md
        "weighted_by_key": records.STEPS,
        "arrayrecord_key": records.ARRAYS,
        "configrecord_key": records.CONFIG,
    }
    makers: dict[str, Callable[[], Any]] = {
        "fedavg": lambda: FedAvg(**common),
        "fedavgm": lambda: FedAvgM(
            **common, server_learning_rate=options.server_step, server_momentum=options.server_momentum
        ),
        "fedprox": lambda: FedProx(**common, proximal_mu=options.proximal_mu),
        "fedadam": lambda: FedAdam(**common, eta=options.server_learning_rate),
        "fedmedian": lambda: FedMedian(**common),
    }
    strategy = makers[options.strategy]()
    if options.privacy == "central":
        noise, norm = options.noise_multiplier, options.clipping_norm
        return DifferentialPrivacyClientSideFixedClipping(strategy, noise, norm, num_sites)
    return strategy


class SiteStrategy(Strategy):
    """Wraps a strategy. What does not fit or is not finite never reaches it, and costs the site its round."""

    def __init__(
        self,
        inner: Any,
        start: SharedState,
        options: FederationOptions,
        report: Callable[[dict[str, Any], SharedState], None],
    ):
        """`start` is what all sites begin with. `report` is given the figures and the outcome of every round."""
        self._inner = inner
        self._options = options
        self._report = report
        self.shared = start
        """What all sites have learned together so far."""
        is_robust = isinstance(getattr(inner, "strategy", inner), ROBUST)
        self._merge: Callable[..., RunningMoments] = merge_by_median if is_robust else merge_by_count

    def summary(self) -> None:
        self._inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._began = time.monotonic()
        config[records.UPDATES] = self._options.updates_per_round
        config[records.MOMENTS] = self.shared.packed_moments()
        messages = list(self._inner.configure_train(server_round, arrays, config, grid))
        # Only now: FedAdam keeps the exact weights that it is given here, and goes on from them.
        arrays_sent = records.to_arrays(self.shared.weights, self._options.send_as)
        for message in messages:
            message.content[records.ARRAYS] = arrays_sent
        self._bytes_down = sum(records.num_bytes(message.content) for message in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        accepted: dict[str, tuple[Message, SharedState]] = {}
        refused: dict[str, str] = {}
        bytes_up = 0
        for reply in replies:
            name = f"node {reply.metadata.src_node_id}"
            if reply.has_error():
                refused[name] = str(reply.error.reason)
                continue
            bytes_up += records.num_bytes(reply.content)
            try:
                # A name is only for people: whoever takes that of another site must not cost that site its round.
                said = _site_name(reply)
                name = said if said not in accepted and said not in refused else f"{said} ({name})"
                accepted[name] = self._checked(reply)
            except UserError as error:
                refused[name] = str(error)
        for name, reason in refused.items():
            logger.warning("round %d goes on without %s: %s", server_round, name, reason)
        if not accepted:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "none answered in time"
            raise LearnerFailure(f"no site is left in round {server_round} ({reasons})")
        # By name: the order in which sites finish must not decide the last bits of a sum.
        names = sorted(accepted)
        figures = {name: _figures(accepted[name][0].content[records.METRICS]) for name in names}
        arrays, metrics = self._inner.aggregate_train(server_round, [accepted[name][0] for name in names])
        if arrays is None:
            raise LearnerFailure(f"Flower's strategy put nothing together in round {server_round}")
        self._take(arrays, [accepted[name][1] for name in names])
        self._report(
            {
                "round": server_round,
                "sites": figures,
                "refused": refused,
                "bytes_down": self._bytes_down,
                "bytes_up": bytes_up,
                "seconds": time.monotonic() - self._began,
            },
            self.shared,
        )
        return records.to_arrays(self.shared.weights), metrics

    def _checked(self, reply: Message) -> tuple[Message, SharedState]:
        """Return a reply with nothing in it but what was checked: Flower gives up a whole round if the messages of two
        sites have different records. And return what the site shares."""
        shared = shared_state.fitted(records.read_shared(reply.content, records.SITE), self.shared)
        try:
            metrics = reply.content[records.METRICS]
            steps, mean_return = metrics[records.STEPS], metrics.get(records.RETURN, math.nan)
        except records.UNREADABLE as error:
            raise UserError(f"its message lacks {error}") from None
        if not (isinstance(steps, int | float) and math.isfinite(steps) and steps > 0):
            raise UserError(f"it has trained {steps!r} steps")
        if not isinstance(mean_return, int | float):
            raise UserError(f"its mean return is {mean_return!r}")
        weights = {path: shared.weights[path] for path in self.shared.weights}
        figures = MetricRecord({records.STEPS: steps, records.RETURN: float(mean_return)})
        reply.content = RecordDict({records.ARRAYS: records.to_arrays(weights), records.METRICS: figures})
        return reply, shared

    def _take(self, arrays: ArrayRecord, sites: list[SharedState]) -> None:
        before = self.shared
        moments = {
            path: self._merge(base, [site.moments[path] for site in sites]) for path, base in before.moments.items()
        }
        # `fitted` brings float32 back: FedAdam computes in float64, which would double what the next round sends.
        merged = SharedState(records.to_weights(arrays), moments)
        try:
            self.shared = shared_state.fitted(merged, before)
        except UserError as error:
            raise LearnerFailure(f"what Flower's strategy put together cannot be used: {error}") from None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None


def _site_name(reply: Message) -> str:
    try:
        return str(reply.content[records.SITE][records.NAME])
    except records.UNREADABLE:
        raise UserError("it does not say its name") from None


def _figures(metrics: Any) -> dict[str, float | None]:
    mean_return = float(metrics.get(records.RETURN, math.nan))
    # JSON has no NaN.
    return {"steps": int(metrics[records.STEPS]), "mean_return": mean_return if math.isfinite(mean_return) else None}
