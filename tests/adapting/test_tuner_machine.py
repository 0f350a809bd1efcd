"""Whatever a run shows, the tuner keeps to its rules: hypothesis looks for a run in which it does not."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freerun.adapting.knobs import Knob
from freerun.adapting.observation import Observation
from freerun.adapting.rules import Circumstances
from freerun.adapting.tuner import MOST_WINDOWS, Tuner, Turn

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


class TunerMachine(RuleBasedStateMachine):
    @initialize(data=st.data(), names=st.sets(st.sampled_from(NAMES), min_size=1), budget=st.none() | st.just(1.0))
    def begin(self, data: st.DataObject, names: set[str], budget: float | None) -> None:
        knobs = []
        for name in sorted(names):
            low, value, high = sorted(data.draw(st.tuples(*[st.integers(1, 512)] * 3), label=name))
            knobs.append(Knob(name, value, low, high, is_whole=name != "update_ratio"))
        self.tuner = Tuner(knobs, Circumstances(2, budget))
        self.values = {knob.name: float(knob.value) for knob in knobs}
        self.tried: Turn | None = None
        self.windows_of_trial = 0

    @rule(seen=WINDOWS)
    def observe(self, seen: Observation) -> None:
        self.windows_of_trial += self.tried is not None
        for turn in self.tuner.observe(seen):
            assert turn.reason
            if turn.kind == "try":
                assert self.tried is None, "two changes at once"
                assert turn.old == self.values[turn.knob] != turn.new
                self.tried, self.windows_of_trial = turn, 0
            else:
                assert self.tried is not None, "a verdict on nothing"
                assert turn.effect is not None
                assert turn.knob == self.tried.knob
                assert turn.new == (self.tried.new if turn.kind == "keep" else self.tried.old)
                self.tried = None
            self.values[turn.knob] = turn.new

    @rule()
    def abandon(self) -> None:
        turns = self.tuner.abandon("workers failed")
        assert len(turns) == (self.tried is not None)
        for turn in turns:
            assert self.tried is not None
            assert (turn.kind, turn.knob, turn.new) == ("undo", self.tried.knob, self.tried.old)
            self.values[turn.knob] = turn.new
        self.tried = None

    @invariant()
    def values_are_those_that_were_told_and_keep_to_their_bounds(self) -> None:
        for name, knob in self.tuner.knobs.items():
            assert knob.value == self.values[name]
            assert knob.low <= knob.value <= knob.high
            assert not knob.is_whole or knob.value == round(knob.value)

    @invariant()
    def a_verdict_comes_in_time(self) -> None:
        assert (self.tuner.trial is None) == (self.tried is None)
        assert self.windows_of_trial < MOST_WINDOWS or self.tried is None


TestTuner = TunerMachine.TestCase
TestTuner.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
