"""The fleet with fake workers: no process, no thread, no real time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake_workers import FakePlace, make_segment

from freerun.collecting.scheduling.dropping_queue import DroppingQueue
from freerun.collecting.scheduling.segment_rounds import SegmentRounds
from freerun.collecting.scheduling.units import (
    REPEAT_EPISODES,
    SKIP_EPISODES,
    EpisodeUnits,
    FailureRules,
    SegmentUnits,
    short_segments_ahead,
)
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.collecting.workers.worker_handle import UnitFinished
from freerun.core import (
    CollectorSettings,
    Demand,
    EnvFailure,
    ModeOptions,
    NotFinite,
    State,
    TuningBounds,
    UserError,
    WorkerDied,
    WorkerHung,
)


class Clock:
    """A time that only moves when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Tracked:
    """Tracks that remember the last state of each worker."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    def set_state(self, track: int, state: State, at: float | None = None) -> None:
        self.states[track] = state


class EpisodeFleet:
    """A fleet that plays rounds of episodes, turn by turn."""

    def __init__(self, num_workers: int = 2, starts_together: bool = False, envs_per_worker: int = 1, **more: Any):
        self.tracks = Tracked()
        settings = CollectorSettings(num_workers, more.pop("max_lag", 0), seed=3, tracks=self.tracks, **more)
        self.place = FakePlace(starts_together)
        self.units = EpisodeUnits(settings, envs_per_worker)
        self.rounds = self.units.rounds
        self.fleet = WorkerFleet(settings, ModeOptions(), self.rounds, self.units, self.place)
        self.fleet.roster.start_all()
        self.place.ready(*range(num_workers))
        self.fleet.turn()

    def open(self, num_episodes: int) -> None:
        self.rounds.open(Demand(episodes=num_episodes))
        self.fleet.turn()

    def held(self) -> list[list[int]]:
        return [handle.units for handle in sorted(self.place.handles, key=lambda handle: handle.index)]


def test_units_go_first_to_workers_that_hold_fewest_and_a_round_is_handed_over_whole() -> None:
    run = EpisodeFleet(num_workers=2, envs_per_worker=2)
    run.open(3)
    assert run.held() == [[0, 2], [1]]
    for index in (0, 0, 1):
        assert run.rounds.take() is None
        run.place.finish(index)
        run.fleet.turn()
    segments = run.rounds.take()
    assert segments is not None
    assert [int(segment.episode[0, 0]) for segment in segments] == [0, 1, 2]


def test_a_worker_that_is_not_ready_gets_nothing() -> None:
    run = EpisodeFleet(2)
    run.place.worker(1).is_ready = False
    run.open(2)
    assert run.held() == [[0], []]


def test_short_units_are_granted_ahead_and_long_ones_are_not() -> None:
    run = EpisodeFleet(1)
    run.open(9)
    assert run.held() == [[0]]
    run.place.finish(0, seconds=0.001)
    run.fleet.turn()
    assert run.held() == [[1, 2, 3, 4, 5]]
    run.place.finish(0, seconds=1.0)
    run.fleet.turn()
    assert run.held() == [[2, 3, 4, 5]], "no more before it holds less than one"


def test_only_workers_that_reported_or_were_granted_something_are_flushed() -> None:
    run = EpisodeFleet(3)
    before = [handle.num_flushes for handle in run.place.handles]
    run.open(1)
    assert [handle.num_flushes - count for handle, count in zip(run.place.handles, before, strict=True)] == [1, 0, 0]


def test_the_units_of_a_worker_that_died_are_run_again_by_another() -> None:
    run = EpisodeFleet(2)
    run.open(3)
    run.place.lose(run.place.worker(0), WorkerDied("killed"))
    run.fleet.turn()
    assert run.tracks.states[0] is State.RESTARTING
    assert run.place.started == [0, 1, 0], "the first time it is started again at once"
    run.place.finish(1)
    run.fleet.turn()
    assert run.held() == [[], [0]], "what was lost comes before anything new"
    counts = run.rounds.counts()
    assert (counts.worker_restarts, counts.episodes_rerun, counts.episodes_started) == (1, 1, 2)


def test_a_worker_may_finish_something_and_die_in_the_same_turn() -> None:
    run = EpisodeFleet(1)
    run.open(1)
    run.place.finish(0)
    run.place.lose(run.place.worker(0), WorkerDied("killed"))
    run.fleet.turn()
    assert run.rounds.take() is not None
    assert run.rounds.counts().worker_restarts == 1


def test_a_worker_that_fails_again_pauses_longer_each_time(clock: Clock) -> None:
    run = EpisodeFleet(2, max_lag=None)
    run.open(9)
    run.place.lose(run.place.worker(0), EnvFailure("it raised"))
    run.fleet.turn()
    run.place.lose(run.place.worker(0), EnvFailure("it raised"))
    run.fleet.turn()
    assert run.place.started == [0, 1, 0], "it pauses"
    run.fleet.turn()
    assert run.place.waits[-1] == pytest.approx(0.1), "the fleet sleeps until the pause is over"
    clock.now += 0.2
    run.fleet.turn()
    assert run.place.started == [0, 1, 0, 0]


def test_a_worker_that_fails_each_time_ends_the_run_with_its_error(clock: Clock) -> None:
    run = EpisodeFleet(1)
    run.open(1)
    for _ in range(2):
        run.place.lose(run.place.worker(0), EnvFailure("it raised"))
        run.fleet.turn()
        clock.now += 10.0
        run.fleet.turn()
    run.place.lose(run.place.worker(0), EnvFailure("it raised"))
    with pytest.raises(EnvFailure, match="worker 0 failed 3 times in a row while nobody finished anything"):
        run.fleet.turn()


def test_an_error_of_the_user_ends_the_run_at_once() -> None:
    run = EpisodeFleet(1)
    run.place.lose(run.place.worker(0), UserError("no such file"))
    with pytest.raises(UserError, match="no such file"):
        run.fleet.turn()


def test_an_episode_that_is_not_finite_is_given_up_where_the_run_is_to_continue() -> None:
    run = EpisodeFleet(1, on_nan="continue")
    run.open(1)
    failure = NotFinite("NaN")
    failure.episode = 0
    run.place.lose(run.place.worker(0), failure)
    run.fleet.turn()
    assert run.rounds.take() == [], "the round is over without it"
    counts = run.rounds.counts()
    assert (counts.episodes_dropped, counts.segments_rejected, counts.worker_restarts) == (1, 1, 1)


def test_a_worker_that_hangs_is_replaced_like_one_that_died() -> None:
    run = EpisodeFleet(1)
    run.open(1)
    run.place.worker(0).end_hung(WorkerHung("no sign of life"))
    run.fleet.turn()
    assert run.place.started == [0, 0]
    assert run.rounds.counts().worker_restarts == 1


def test_with_adapt_every_restart_waits_long_enough_to_undo_a_change(clock: Clock) -> None:
    run = EpisodeFleet(1, tuning_bounds=TuningBounds(max_workers=2))
    run.place.lose(run.place.worker(0), WorkerDied("killed"))
    run.fleet.turn()
    assert run.place.started == [0]
    clock.now += 0.6
    run.fleet.turn()
    assert run.place.started == [0, 0]


# ---------------------------------------------------------------------------------------------- more or fewer workers


def test_a_fleet_grows_one_worker_at_a_time() -> None:
    run = EpisodeFleet(1)
    run.fleet.resize(3)
    run.fleet.turn()
    assert run.place.started == [0, 1]
    run.fleet.turn()
    assert run.place.started == [0, 1, 2]
    assert not run.fleet.roster.is_complete()
    run.place.ready(1, 2)
    run.fleet.turn()
    assert run.fleet.roster.is_complete()
    assert run.rounds.num_envs == 3


def test_a_surplus_worker_goes_when_it_has_nothing_left_to_do() -> None:
    run = EpisodeFleet(2)
    run.open(4)
    surplus = run.place.worker(1)
    run.fleet.resize(1)
    run.fleet.turn()
    assert not surplus.is_retired
    run.place.finish(1)
    run.fleet.turn()
    assert surplus.is_retired
    assert run.tracks.states[1] is State.PARKED
    assert surplus.granted == [1], "it got nothing more"
    assert run.rounds.counts().worker_restarts == 0


def test_an_outdated_worker_is_replaced_when_it_has_nothing_left_to_do() -> None:
    run = EpisodeFleet(2)
    run.open(2)
    run.place.worker(0).is_outdated = True
    run.fleet.turn()
    assert run.place.started == [0, 1]
    run.place.finish(0)
    run.fleet.turn()
    assert run.place.started == [0, 1, 0]


# ---------------------------------------------------------------------------------------------- a pool


def test_a_unit_that_fails_alone_is_run_again_while_its_worker_keeps_the_rest(clock: Clock) -> None:
    run = EpisodeFleet(1, starts_together=True)
    run.open(3)
    run.place.finish(0, seconds=0.001)
    run.fleet.turn()
    assert run.held() == [[1, 2]]
    for _ in range(2):
        run.place.fail_unit(0, EnvFailure("it raised"))
        run.fleet.turn()
    assert run.held() == [[1]], "after the second failure it pauses"
    assert run.place.started == [0]
    clock.now += 1.0
    run.fleet.turn()
    assert run.held() == [[1, 2]]


def test_workers_that_start_together_wait_for_the_longest_pause_and_the_blameless_count_nothing(clock: Clock) -> None:
    run = EpisodeFleet(2, starts_together=True)
    run.open(2)
    for _ in range(2):
        for handle, failure in ((run.place.worker(0), EnvFailure("it raised")), (run.place.worker(1), None)):
            run.place.lose(handle, failure)
        run.fleet.turn()
    assert run.place.started == [0, 1, 0, 1]
    clock.now += 0.2
    run.fleet.turn()
    assert run.place.started == [0, 1, 0, 1, 0, 1]
    assert run.rounds.counts().worker_restarts == 2


def test_workers_that_start_together_are_replaced_only_when_all_are_gone() -> None:
    run = EpisodeFleet(2, starts_together=True)
    run.open(2)
    run.fleet.resize(3)
    for handle in run.place.handles:
        handle.is_outdated = True
    run.place.finish(0)
    run.fleet.turn()
    run.fleet.turn()
    assert run.place.started == [0, 1]
    run.place.finish(1)
    run.fleet.turn()
    assert run.place.started == [0, 1, 0, 1, 2]


# ---------------------------------------------------------------------------------------------- segments


class SegmentFleet:
    """A fleet that plays segments, each of which continues its worker's last one."""

    def __init__(self, num_workers: int = 2, rules: FailureRules = REPEAT_EPISODES):
        settings = CollectorSettings(num_workers, 1, seed=3)
        self.place = FakePlace()
        self.rounds = SegmentRounds(num_workers, 1, unit_steps=2)
        units = SegmentUnits(self.rounds.accounting, rules)
        self.fleet = WorkerFleet(settings, ModeOptions(), self.rounds, units, self.place)
        self.fleet.roster.start_all()
        self.place.ready(*range(num_workers))
        self.rounds.open(Demand(steps=2 * num_workers))
        self.fleet.turn()


def test_a_lost_segment_is_run_by_the_successor_and_by_nobody_else() -> None:
    run = SegmentFleet(2)
    lost = run.place.worker(0)
    assert lost.units == [0]
    run.place.lose(lost, WorkerDied("killed"))
    run.fleet.turn()
    run.place.finish(1)
    run.fleet.turn()
    assert 0 not in run.place.worker(1).granted
    run.place.ready(0)
    run.fleet.turn()
    assert run.place.worker(0).units[0] == 0


@pytest.mark.parametrize(
    ("rules", "from_outside", "next_episode"),
    [(REPEAT_EPISODES, True, 0), (SKIP_EPISODES, True, 4), (REPEAT_EPISODES, False, 4)],
)
def test_a_successor_plays_again_only_what_was_ended_from_outside(
    rules: FailureRules, from_outside: bool, next_episode: int
) -> None:
    run = SegmentFleet(2, rules)
    lost = run.place.worker(0)
    lost.begun = 2  # it had begun episodes 0 and 2, and nothing of them has arrived
    failure = WorkerDied("killed")
    failure.from_outside = from_outside
    run.place.lose(lost, failure)
    run.fleet.turn()
    assert run.rounds.accounting.next_episode(0) == next_episode


def test_long_segments_are_granted_one_by_one_and_short_ones_ahead() -> None:
    """A segment that waits at a slow worker cannot be played by one that is idle."""
    rounds = SegmentRounds(1, 1, unit_steps=4)
    many = SegmentUnits(rounds.accounting, units_ahead=short_segments_ahead)
    assert (many.capacity(0.001), many.capacity(0.4)) == (2, 1)
    assert SegmentUnits(rounds.accounting).capacity(0.4) == 2  # a single collector has nobody to wait for


def test_a_queue_that_drops_gets_the_importance_of_each_segment() -> None:
    settings = CollectorSettings(1, None, seed=3)
    place, queue = FakePlace(), DroppingQueue(1, max_queue_size=2)
    fleet = WorkerFleet(settings, ModeOptions(), queue, SegmentUnits(queue.accounting, SKIP_EPISODES), place)
    fleet.roster.start_all()
    place.ready(0)
    fleet.importance = lambda segment: -float(segment.episode[0, 0])
    fleet.turn()
    for number in range(4):
        worker = place.worker(0)
        place.reports.append(UnitFinished(worker, worker.units[0], make_segment(number)))
        fleet.turn()
    kept = [int(segment.episode[0, 0]) for segment in queue.take_arrived()]
    assert kept == [0, 1]


# ---------------------------------------------------------------------------------------------- the learner


def test_the_learner_gets_the_failure_that_ends_the_run_whenever_it_collects() -> None:
    """Here the fleet has its thread: the place ends the run when its worker has been granted an episode."""
    settings = CollectorSettings(1, 0, seed=3)
    place = _EndingPlace()
    units = EpisodeUnits(settings)
    fleet = WorkerFleet(settings, ModeOptions(), units.rounds, units, place)
    fleet.start()
    try:
        for demand in (Demand(episodes=1), Demand()):
            with pytest.raises(UserError, match="no such file"):
                fleet.collect(demand)
    finally:
        fleet.close()
    assert place.is_closed


class _EndingPlace(FakePlace):
    def wait(self, seconds: float | None) -> Any:
        worker = self.worker(0)
        if worker.granted:
            self.lose(worker, UserError("no such file"))
        elif not worker.is_ready:
            self.ready(0)
        return super().wait(seconds)
