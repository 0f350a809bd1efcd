"""Whatever a run shows, the tuner keeps to its rules: hypothesis looks for a run in which it does not."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freerun.core import Tunable
from freerun.tuning.observation import Observation
from freerun.tuning.rules import Circumstances
from freerun.tuning.tuner import MAX_WINDOWS, Change, Tuner

SHARE = st.floats(0, 1)
WINDOWS = st.builds(
    Observation,
    seconds=st.floats(0.5, 60),
    steps_per_second=st.one_of(st.just(0.0), st.floats(1, 1e6)),
    noise=st.floats(0, 0.5),
    learner_waiting=SHARE,
    workers_busy=SHARE,
    workers_waiting_for_slot=SHARE,
    workers_waiting_for_weights=SHARE,
    cpu=SHARE,
    queue_fill=st.none() | SHARE,
    dropped=SHARE,
    buffer_fill=st.none() | SHARE,
    lag=st.floats(0, 50),
)
NAMES = ("num_workers", "envs_per_worker", "queue_size", "collection_batch", "minibatch", "update_ratio")


def make_tunable(name: str, value: float, low: float, high: float) -> Tunable:
    return Tunable(name, lambda: value, lambda wanted: None, low, high, is_whole=name != "update_ratio")


class TunerMachine(RuleBasedStateMachine):
    @initialize(data=st.data(), names=st.sets(st.sampled_from(NAMES), min_size=1), budget=st.none() | st.just(1.0))
    def begin(self, data: st.DataObject, names: set[str], budget: float | None) -> None:
        tunables, self.values = [], {}
        for name in sorted(names):
            low, value, high = sorted(data.draw(st.tuples(*[st.integers(1, 512)] * 3), label=name))
            self.values[name] = float(value)
            tunables.append(make_tunable(name, value, low, high))
        self.tuner = Tuner(tunables, Circumstances(2, budget))
        self.tried: Change | None = None
        self.windows_of_trial = 0

    @rule(seen=WINDOWS)
    def observe(self, seen: Observation) -> None:
        self.windows_of_trial += self.tried is not None
        for change in self.tuner.observe(seen):
            assert change.reason
            if change.kind == "try":
                assert self.tried is None, "two changes at once"
                assert change.old == self.values[change.name] != change.new
                self.tried, self.windows_of_trial = change, 0
            else:
                assert self.tried is not None, "a verdict on nothing"
                assert change.effect is not None
                assert change.name == self.tried.name
                assert change.new == (self.tried.new if change.kind == "keep" else self.tried.old)
                self.tried = None
            self.values[change.name] = change.new

    @rule()
    def abandon(self) -> None:
        changes = self.tuner.abandon("workers failed")
        assert len(changes) == (self.tried is not None)
        for change in changes:
            assert self.tried is not None
            assert (change.kind, change.name, change.new) == ("undo", self.tried.name, self.tried.old)
            self.values[change.name] = change.new
        self.tried = None

    @invariant()
    def values_are_those_that_were_told_and_keep_to_their_bounds(self) -> None:
        assert self.tuner.values == self.values
        for name, tunable in self.tuner.tunables.items():
            assert tunable.low <= self.values[name] <= tunable.high
            assert not tunable.is_whole or self.values[name] == round(self.values[name])

    @invariant()
    def a_verdict_comes_in_time(self) -> None:
        assert (self.tuner.trial is None) == (self.tried is None)
        assert self.windows_of_trial < MAX_WINDOWS or self.tried is None


TestTuner = TunerMachine.TestCase
TestTuner.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
