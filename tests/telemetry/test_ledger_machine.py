"""The ledger and a collector's own counts balance at any time, whatever is lost, run again or given up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freerun.collecting.scheduling.rounds import Rounds
from freerun.core import Demand, Segment
from freerun.telemetry.ledger import Ledger


def episode(number: int, length: int, version: int) -> Segment:
    shape = (length, 1)
    ended = np.zeros(shape, np.bool_)
    ended[-1] = True
    zeros = np.zeros(shape, np.float32)
    return Segment(
        obs=zeros,
        action=zeros,
        log_prob=zeros,
        reward=np.ones(shape, np.float32),
        terminated=ended,
        truncated=np.zeros(shape, np.bool_),
        next_obs=zeros,
        version=np.full(shape, version),
        episode=np.full(shape, number),
        seconds=0.0,
    )


class LedgerMachine(RuleBasedStateMachine):
    @initialize(max_lag=strategies.integers(0, 2))
    def start(self, max_lag: int) -> None:
        self.rounds, self.ledger = Rounds(max_lag), Ledger()
        self.running: set[int] = set()
        self.trained: list[int] = []
        self.given_up: set[int] = set()
        self.lengths: dict[int, int] = {}
        self.num_steps = 0

    @rule(episodes=strategies.integers(1, 4))
    def demand(self, episodes: int) -> None:
        self.rounds.open(Demand(episodes=episodes))

    @rule(num=strategies.integers(1, 4))
    def begin(self, num: int) -> None:
        for _ in range(num):
            if (number := self.rounds.next()) is not None:
                assert number not in self.running
                assert number not in self.given_up
                self.running.add(number)

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), fate=strategies.sampled_from(["finish", "finish", "lose", "give up"]))
    def end(self, data: strategies.DataObject, fate: str) -> None:
        number = data.draw(strategies.sampled_from(sorted(self.running)))
        self.running.remove(number)
        if fate == "finish":
            self.lengths[number] = 1 + number % 5
            self.rounds.finish(number, episode(number, self.lengths[number], self.ledger.version))
        elif fate == "lose":
            self.rounds.lost(number)
        else:
            self.rounds.give_up(number)
            self.given_up.add(number)

    @precondition(lambda self: hasattr(self, "rounds"))
    @rule(all_of_it=strategies.booleans(), update=strategies.booleans())
    def take(self, all_of_it: bool, update: bool) -> None:
        segments = self.rounds.take() if all_of_it else self.rounds.take_arrived()
        if segments is None:
            return
        self.ledger.account(segments)
        numbers = [int(segment.episode[0, 0]) for segment in segments]
        assert not self.given_up & set(numbers)
        self.trained += numbers
        self.num_steps += sum(self.lengths[number] for number in numbers)
        if update:
            self.ledger.finish_update()
            self.rounds.version = self.ledger.version

    @precondition(lambda self: self.trained)
    @rule()
    def what_comes_twice_is_found(self) -> None:
        ledger = Ledger()
        ledger.account([episode(self.trained[-1], 1, 0)])
        ledger.finish_update()
        ledger.account([episode(self.trained[-1], 1, 0)])
        with pytest.raises(RuntimeError, match="trained twice"):
            ledger.finish_update()

    @invariant()
    def it_balances(self) -> None:
        if hasattr(self, "rounds"):
            self.ledger.check_balance(self.rounds.counts())
            assert self.ledger.steps == self.num_steps
            assert self.trained == sorted(set(self.trained)), "in order, none twice"
            summary = self.ledger.summary(self.rounds.counts())
            assert summary["dropped"] == len(self.given_up)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
