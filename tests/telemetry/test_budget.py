"""The budget says how far a run has come and what it may still collect."""

from __future__ import annotations

from freerun.core import Demand
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger


def test_a_demand_is_cut_to_the_steps_that_are_left() -> None:
    ledger = Ledger()
    ledger.steps = 700
    budget = Budget(1000, None)
    assert budget.steps_left(ledger) == 300
    assert budget.within(Demand(steps=200, next_steps=200), ledger) == Demand(0, 200, True, 200, 300)
    assert budget.within(Demand(steps=500, next_steps=500), ledger) == Demand(0, 300, True, 500, 300)
    assert budget.within(Demand(episodes=4), ledger) == Demand(episodes=4, steps_left=300)
    assert not budget.within(Demand(), ledger), "what takes what has arrived goes on doing so"
    ledger.steps = 1200
    assert budget.steps_left(ledger) == 0


def test_without_total_steps_nothing_is_cut() -> None:
    budget, demand = Budget(None, 10), Demand(steps=500)
    assert budget.steps_left(Ledger()) is None
    assert budget.within(demand, Ledger()) is demand
