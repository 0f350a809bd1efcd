"""Which episodes may start, which are under way, which are finished: room is permission (decision 4)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from freerun.core import Counts, Demand, Segment, Start

FIRST_ROUND_EPISODES = 8
"""What a demand in steps starts with, before any episode's length is known."""
ROUNDS_WITHOUT_LIMIT = 16
"""Where the lag has no limit, the room for what waits for the learner still has: so many rounds."""
RECENT_EPISODES = 32
"""Whose lengths say how many steps an episode that has just started will take."""


class Lengths:
    """How many episodes a demand in steps comes to, by those that were taken at the newest version so far."""

    def __init__(self, last_round: tuple[int, int] = (0, 0)):
        self._version = -1
        self._steps, self._episodes = last_round

    def note(self, version: int, num_steps: int, num_episodes: int) -> None:
        if self._version != version and num_episodes:
            self._version, self._steps, self._episodes = version, 0, 0
        self._steps += num_steps
        self._episodes += num_episodes

    def episodes_for(self, steps: int, version: int) -> int:
        """How many episodes to wait for now.

        Lengths measured under older weights may be off: wait for most of them first, then count again.
        """
        if self._episodes == 0:
            return FIRST_ROUND_EPISODES
        estimate = steps * self._episodes / self._steps
        return math.ceil(estimate) if self._version == version else max(1, int(0.75 * estimate))


class Rounds:
    """Deals out episode numbers in order and hands finished episodes back in order; or segments of `unit_steps`.

    A round is the episodes of one `collect`. Episodes of up to `max_lag` later rounds may start early. A round is
    always the next episodes by number, never the first to finish, so short episodes are not favoured; and whatever
    was started is trained, so none is lost.
    """

    def __init__(self, max_lag: int | None, unit_steps: int | None = None, start: Start | None = None):
        start = start or Start()
        self.book = replace(start.counts)
        self.version = 0
        self._max_lag = max_lag
        self._rounds_ahead = ROUNDS_WITHOUT_LIMIT if max_lag is None else max_lag
        self._unit_steps = unit_steps
        first = start.episode if unit_steps is None else 0
        self._oldest = first  # what is older belongs to an earlier training
        self._first = first  # the oldest episode that has not been taken
        self._end = first  # the round is [first, end), or more (see `_round_end`)
        self._limit = first  # episodes below this may start
        self._next = first  # the next episode that was never started
        self._again: deque[int] = deque()  # started and lost: run again before anything new
        self._put_back: deque[int] = deque()  # dealt out, but not begun
        self._started: dict[int, int] = {}  # not taken yet: version at the start
        self._finished: dict[int, Segment] = {}
        self._given_up: set[int] = set()  # not taken yet
        self._lengths = Lengths(start.last_round)
        self._steps_due = 0  # of the demand, if it is in steps: not taken yet
        self._steps_ahead: int | None = None  # for a demand in steps: how many may be under way beyond it
        self._recent_lengths: deque[int] = deque(start.lengths, maxlen=RECENT_EPISODES)

    def renew(self, start: Start) -> None:
        """Forget everything; what an earlier training had started is ignored when it arrives."""
        Rounds.__init__(self, self._max_lag, self._unit_steps, start)

    def open(self, demand: Demand) -> None:
        """Grant the episodes that meet the demand, and as many again for every update of allowed lag.

        Until the length of episodes is known, a demand in steps grants nothing ahead: it could be far too much.
        """
        num_units = units_ahead = demand.episodes
        next_steps = demand.steps if demand.next_steps is None else demand.next_steps
        self._steps_ahead = None
        if demand.steps and self._unit_steps is not None:
            num_units, units_ahead = (math.ceil(steps / self._unit_steps) for steps in (demand.steps, next_steps))
        elif demand.steps:
            num_units = demand.episodes or self._lengths.episodes_for(demand.steps, self.version)
            self._steps_due = demand.steps
            self._steps_ahead = next_steps * self._rounds_ahead
        self._end = self._first + num_units
        self._limit = max(self._limit, self._end)
        if self._steps_ahead is None:
            self._limit = max(self._limit, self._end + units_ahead * self._rounds_ahead)

    def _may_run_ahead(self) -> bool:
        """Whether the steps expected of what is not taken yet leave room for one more episode.

        They are counted from the oldest, for a round that waits for most of its episodes first needs the rest as well.

        Asked anew for each, with the newest lengths: while a policy learns to live longer, an estimate that is one
        update old grants far more steps than were asked for.
        """
        if not self._steps_ahead or len(self._recent_lengths) < FIRST_ROUND_EPISODES:
            return False
        expected = sum(self._recent_lengths) / len(self._recent_lengths)
        ahead = sum(
            self._finished[number].num_steps if number in self._finished else expected
            for number in range(self._first, self._next)
            if number not in self._given_up
        )
        return ahead < self._steps_due + self._steps_ahead

    def next(self) -> int | None:
        """An episode that may start now, if there is one."""
        if self._put_back:
            return self._put_back.popleft()
        if self._again:
            self.book.episodes_rerun += 1
            return self._again.popleft()
        if self._next >= self._limit and not self._may_run_ahead():
            return None
        number = self._next
        self._next += 1
        self._started[number] = self.version
        self.book.episodes_started += 1
        return number

    def seconds_to_next(self) -> None:
        """Only what the learner does makes room for more."""

    def finish(self, number: int, segment: Segment) -> None:
        if number < self._oldest:
            return
        if number not in self._started or number in self._finished:
            raise RuntimeError(f"episode {number} was delivered but is not under way")
        self._finished[number] = segment
        self._recent_lengths.append(segment.num_steps)
        self.book.episodes_delivered += 1
        self.book.steps_delivered += segment.num_steps
        self.book.busy_seconds += segment.seconds

    def lost(self, number: int) -> None:
        """The worker died: the same episode, with the same seeds, is run again."""
        if number >= self._oldest:
            self._again.append(number)

    def put_back(self, numbers: Sequence[int]) -> None:
        """Nobody has begun them: they are dealt out again before anything else."""
        self._put_back.extend(numbers)

    def give_up(self, number: int) -> None:
        """It fails each time and may be done without: its round goes on with one less."""
        if number >= self._oldest:
            del self._started[number]
            self._given_up.add(number)
            self.book.episodes_dropped += 1

    def counts(self) -> Counts:
        return replace(self.book, episodes_in_flight=len(self._started), episodes_settled=self._first)

    @property
    def missing(self) -> list[int]:
        """Episodes of this round that are not finished."""
        return [number for number in range(self._first, self._round_end()) if not self._is_settled(number)]

    def _is_settled(self, number: int) -> bool:
        return number in self._finished or number in self._given_up

    def take(self) -> list[Segment] | None:
        """The round in the order of its episodes, once all of it is finished."""
        end = self._round_end()
        if not all(self._is_settled(number) for number in range(self._first, end)):
            return None
        return self._take_until(end)

    def take_arrived(self) -> list[Segment]:
        """What is finished, in order, without waiting."""
        end = self._first
        while self._is_settled(end):
            end += 1
        return self._take_until(end)

    def _round_end(self) -> int:
        """Demand shrinks when episodes grow longer; an episode that would be too old next time is taken now."""
        if self._max_lag is None:
            return self._end
        due = [number for number, version in self._started.items() if version <= self.version - self._max_lag]
        return max(self._end, max(due, default=-1) + 1)

    def _take_until(self, end: int) -> list[Segment]:
        numbers = [number for number in range(self._first, end) if number not in self._given_up]
        segments = [self._finished.pop(number) for number in numbers]
        for number in numbers:
            del self._started[number]
        self._given_up = {number for number in self._given_up if number >= end}
        self._first = end
        num_steps = sum(segment.num_steps for segment in segments)
        self._steps_due = max(0, self._steps_due - num_steps)
        self._lengths.note(self.version, num_steps, len(segments))
        return segments
