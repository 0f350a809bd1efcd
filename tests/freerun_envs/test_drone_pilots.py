"""Scripted pilots: they do what their names say, and nobody beats the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from freerun_envs.drone_physics import GRAVITY
from freerun_envs.drone_pilots import HoverPilot, LawnMower, Pilot, RandomPilot, WaypointPilot, fly, most_return
from freerun_envs.drone_sim import RoughDroneSim


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def drones(task: str, version: int = 0, episode_seconds: float | None = None) -> RoughDroneSim:
    return RoughDroneSim(16, task=task, seed=7, episode_seconds=episode_seconds, autoreset=False, version=version)


@pytest.mark.parametrize(
    ("task", "version", "make", "least"),
    [
        ("hover", 0, HoverPilot, 130.0),
        ("waypoint", 0, partial(WaypointPilot, speed=6.0), 60.0),
        ("explore", 0, partial(LawnMower, speed=4.0), 17.0),
        ("explore", 1, partial(LawnMower, speed=10.0), 40.0),
    ],
)
def test_a_pilot_does_its_task(task: str, version: int, make: Callable[[RoughDroneSim], Pilot], least: float) -> None:
    sim = drones(task, version)
    most = most_return(sim)
    flights = fly(sim, make(sim))
    assert least < float(flights.returns.mean()) < most
    assert float(flights.crashed.float().mean()) < 0.25
    sim = drones(task, version)
    unskilled = fly(sim, RandomPilot(sim, seed=0))
    assert unskilled.crashed.all()
    assert float(unskilled.returns.mean()) < 5.0
    assert float(sim.seen_share().max()) <= 1.0


def test_hovering_in_place_stays_and_sees_no_more() -> None:
    sim = drones("explore", episode_seconds=2.0)
    start = sim.body.position.clone()
    before = sim.seen_share()
    flights = fly(sim, HoverPilot(sim))
    assert not flights.crashed.any()
    assert flights.num_steps.tolist() == [100] * 16
    assert float((sim.body.position - start).norm(dim=1).max()) < 0.2
    assert float((flights.seen_share - before).max()) <= 6 / 1600


def test_a_crash_ends_what_counts() -> None:
    sim = drones("explore", episode_seconds=4.0)
    sim.body.position[0, 2] = 9.0  # above the ceiling
    flights = fly(sim, HoverPilot(sim))
    assert flights.crashed.tolist() == [True] + [False] * 15
    assert float(flights.num_steps[0]) == 1
    assert float(flights.returns[0]) == pytest.approx(-1.0, abs=0.02)


def test_bounds_by_hand() -> None:
    # 0.5 a metre and 0.05 · v² a second: 5 m/s is best, and brings 1.25 a second.
    assert most_return(drones("explore")) == pytest.approx(25.0)
    assert most_return(drones("explore", episode_seconds=4.0)) == pytest.approx(5.0)
    # Without that cost, it is every cell but some 20 that are seen at the start.
    sim = drones("explore", version=1)
    assert most_return(sim) == pytest.approx(160.0 * (1 - float(sim.seen_share().mean())), rel=1e-5)
    # All of 15 a second except for the time in which the drone climbs one metre.
    climbing = math.sqrt(2 / (0.9 * GRAVITY))
    assert 15 * (10 - climbing) < most_return(drones("hover")) < 150
    # Goals are more than 6 m apart on average, so a metre brings 1 to 2: 20 s · k² / 0.2.
    assert 100 < most_return(drones("waypoint")) < 400
