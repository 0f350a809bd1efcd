"""Carries changed arguments of environments from the learner to every worker, wherever it lives.

They travel with the weights. So they reach workers in every mode by a way that is there already, a worker that is
started again gets them too, and which arguments an episode has depends on the version of its weights alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from freerun.core import AnySegment, Collector, Demand, EnvArgsBox, FloatArray, Policy, UserError

TAIL_SIZE = 2048
"""How many numbers follow the weights: one for each byte of the arguments as JSON, and zeros."""


class EnvArgsChannel:
    """The learner's end."""

    def __init__(self) -> None:
        self.box = EnvArgsBox()
        """The workers' end, for `EnvArgsPolicy` and for the factory of environments."""
        self.env_args: dict[str, Any] = {}
        """All arguments that have changed so far."""
        self.published: dict[str, Any] = {}
        """Those of them that the newest weights were published with."""
        self._held_back: Mapping[str, Any] = {}
        self._num_changes = 0
        self._tail = np.zeros(TAIL_SIZE, np.float32)

    def change(self, env_args: Mapping[str, Any]) -> None:
        """Have environments take these arguments at the first reset after the next weights have reached them."""
        changed = {**self.env_args, **env_args}
        try:
            content = json.dumps([self._num_changes + 1, changed], allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise UserError(f"set_env_args takes numbers, texts, lists and dictionaries: {error}") from None
        if len(content) > TAIL_SIZE:
            raise UserError(
                f"set_env_args takes up to {TAIL_SIZE} bytes, not {len(content)}: put large arguments into a file"
            )
        # One byte per number: any number of its size can be copied as float32 without being changed.
        self._tail = np.zeros(TAIL_SIZE, np.float32)
        self._tail[: len(content)] = np.frombuffer(content, np.uint8)
        self._num_changes += 1
        self.env_args = changed

    def restore(self, published: Mapping[str, Any], newest: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written: its weights have their own arguments, the next ones the newest."""
        if published:
            self.change(published)
        self._held_back = newest

    def extend(self, weights: FloatArray) -> FloatArray:
        """Return weights that are about to be published, followed by the arguments."""
        extended = np.concatenate([weights, self._tail])
        self.published = self.env_args
        if self._held_back:
            self.change(self._held_back)
            self._held_back = {}
        return extended


class EnvArgsPolicy:
    """A policy whose weights are followed by arguments for the environments beside it."""

    def __init__(self, policy: Policy, box: EnvArgsBox):
        self._policy = policy
        self._box = box

    @property
    def weights(self) -> FloatArray:
        return np.concatenate([self._policy.weights, np.zeros(TAIL_SIZE, np.float32)])

    def load(self, weights: FloatArray) -> None:
        self._policy.load(weights[:-TAIL_SIZE])
        tail = weights[-TAIL_SIZE:]
        if tail[0]:  # JSON never begins with a zero
            self._box.take(*json.loads(tail[tail > 0].astype(np.uint8).tobytes()))

    def __getattr__(self, name: str) -> Any:
        # Only what is not found above. Python asks for names with underscores before `_policy` is there to ask.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._policy, name)


def with_env_args(policy: Policy, channel: EnvArgsChannel) -> Policy:
    """Return the policy as workers get it."""
    return cast(Policy, EnvArgsPolicy(policy, channel.box))


class EnvArgsCollector:
    """A collector that publishes arguments together with the weights. Its policy is `with_env_args`."""

    def __init__(self, collector: Collector, channel: EnvArgsChannel):
        self._collector = collector
        self._channel = channel
        self.num_workers, self.counts, self.close = collector.num_workers, collector.counts, collector.close

    def publish(self, weights: FloatArray, version: int) -> None:
        self._collector.publish(self._channel.extend(weights), version)

    def collect(self, demand: Demand) -> Sequence[AnySegment]:
        return self._collector.collect(demand)
