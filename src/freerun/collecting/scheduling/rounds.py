"""Rounds of episodes: which may start within the lag budget, which run, and which are finished."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from freerun.core import CollectorSettings, Counts, Demand, Segment, StartPoint

KNOWN_EPISODES = 8
"""Once this many episodes have finished, their lengths predict those of the next ones."""
RECENT_EPISODES = 32
"""The lengths of this many episodes are remembered."""
ROUNDS_WITHOUT_LIMIT = 16
"""Where the lag has no limit, this many rounds may still be collected ahead, because memory has one."""


class EpisodeLengths:
    """Estimates how long episodes are: the expected length, and a length that none exceeds."""

    def __init__(self, time_limit: int | None = None, recent: Iterable[int] = ()):
        self._time_limit = time_limit
        self._recent: deque[int] = deque(recent, maxlen=RECENT_EPISODES)
        self._measure()

    def note(self, lengths: Iterable[int]) -> None:
        """Add the lengths of the next episodes, in the order of their numbers.

        In the order in which they finish, the short ones would come first, and the estimate would depend on the clock.
        """
        self._recent.extend(lengths)
        self._measure()

    def _measure(self) -> None:
        is_known = len(self._recent) >= KNOWN_EPISODES
        longest = max(self._recent, default=0)
        self.expected: float = self._time_limit or 0.0
        """The mean of the last episodes. Before there are enough of them: the time limit, or 0 if there is none."""
        self.longest: float = math.inf
        """The time limit. Without one: the longest of the last episodes, and infinite before there are enough."""
        if is_known:
            self.expected = sum(self._recent) / len(self._recent)
            self.longest = longest
        if self._time_limit is not None:
            self.longest = max(self._time_limit, longest)  # a wrapper around the time limit may lengthen episodes

    def episodes_for(self, steps: float, num_envs: int) -> int:
        """Return how many episodes may start at once for a demand of this many steps.

        The demand is exceeded by at most one episode for each environment (see `Rounds`)."""
        episodes = max(1, math.ceil(steps / self.longest)) + num_envs - 1
        return min(episodes, max(1, math.ceil(steps / self.expected))) if self.expected else episodes


class Rounds:
    """Grants episode numbers in order and hands finished episodes over in order.

    A round holds the episodes of one `collect`. Episodes of up to `max_lag` later rounds may start early. A round
    always holds the next episodes by number, never the first to finish, so short episodes are not favoured. Whatever
    was started is trained, so none is lost.

    A demand in steps is met by the fewest episodes that reach it. How long an episode will be is not known when it
    starts, and what has started must be trained. So another episode may start only while this holds:

        F + E · u < C    and    F + L · max(0, u − (n − 1)) < C

    C is the number of steps that may be collected: those of the demand, those that the lag allows ahead, and no more
    than the run has left. F counts the steps of episodes that have finished and not been taken, u the episodes that are
    running. E is the expected length of an episode and L the greatest, see `EpisodeLengths`. The first condition stops
    when enough is expected. The second holds for any lengths: it leaves n − 1 running episodes out and counts all
    others as the longest, so the n environments go on playing until the demand is met, and it is exceeded by at most n
    episodes.

    With --deterministic a round must not depend on the number of environments or on the clock. Then n is 1, and a time
    limit makes every round the fewest episodes that meet the demand, in whatever order they finish: an episode starts
    only if all before it cannot be enough, however long they get. Without a time limit L is a guess, and a guess that
    changes while episodes finish would depend on the clock. So `EpisodeLengths.episodes_for` says how many episodes
    start together, and what is missing is counted again only when all of them have finished.
    """

    def __init__(
        self,
        max_lag: int | None,
        start: StartPoint | None = None,
        num_envs: int = 1,
        time_limit: int | None = None,
        deterministic: bool = False,
    ):
        start = start or StartPoint()
        self.totals = replace(start.counts)
        self.version = 0
        self.num_envs = 1 if deterministic else num_envs
        """The number of environments that play episodes at the same time (n above)."""
        self._time_limit = time_limit
        self._max_lag = max_lag
        self._rounds_ahead = ROUNDS_WITHOUT_LIMIT if max_lag is None else max_lag
        self._deterministic = deterministic
        first = start.episode
        self._oldest = first  # what is older belongs to an earlier training
        self._first = first  # the oldest episode that has not been taken
        self._next = first  # the next episode that was never started
        self._settled_end = first  # all below are finished or given up
        self._to_rerun: deque[int] = deque()  # started and lost: they are run again before anything new
        self._started: dict[int, int] = {}  # not taken yet, by number: version at the start
        self._finished: dict[int, Segment] = {}  # not taken yet
        self._given_up: set[int] = set()  # not taken yet
        self._finished_steps = 0  # F above
        self._settled_steps = 0  # those of them below `_settled_end`
        self._lengths = EpisodeLengths(time_limit, start.lengths)
        # A round is complete at this episode number, or with this many steps, whichever comes first.
        self._end: float = first
        self._goal: float = math.inf
        # Episodes below the first number may start in any case; those below the second as far as C allows.
        self._sure_end: float = first
        self._limit: float = first
        # C above is min(steps due + steps ahead, steps left).
        self._steps_due: float = math.inf  # of the demand, without what was taken
        self._steps_ahead: float = 0.0  # what the lag allows beyond the demand
        self._steps_left: float = math.inf  # for the rest of the run

    @classmethod
    def of_episodes(cls, settings: CollectorSettings, num_envs: int) -> Rounds:
        """Make rounds for a mode that hands over whole episodes of this many environments."""
        return cls(settings.max_lag, settings.start, num_envs, settings.time_limit, settings.deterministic)

    def renew(self, start: StartPoint) -> None:
        """Begin another training. What an earlier one had started is ignored when it arrives."""
        settings = (self.num_envs, self._time_limit, self._deterministic)
        Rounds.__init__(self, self._max_lag, start, *settings)

    def open(self, demand: Demand) -> None:
        """Grant what meets the demand, which is not empty, and as much again for every update of allowed lag."""
        next_steps = demand.steps if demand.next_steps is None else demand.next_steps
        self._steps_left = math.inf if demand.steps_left is None else demand.steps_left
        self._steps_due, self._steps_ahead = math.inf, 0.0
        self._goal, self._sure_end = math.inf, self._first
        if demand.steps:
            self._steps_due, self._steps_ahead = demand.steps, next_steps * self._rounds_ahead
        if demand.episodes and demand.steps:  # the episodes were counted already: see `JointCollector`
            self._end = self._sure_end = self._first + demand.episodes
            self._limit = math.inf if self._rounds_ahead else self._end
        elif self._deterministic and self._time_limit is None:
            steps = min(self._steps_due, self._steps_left)
            num_episodes = demand.episodes or math.inf
            if steps < math.inf:
                num_episodes = min(num_episodes, self._lengths.episodes_for(steps, self.num_envs))
            self._end = self._sure_end = self._limit = self._first + num_episodes
        elif demand.episodes:
            self._end, self._goal = self._first + demand.episodes, self._steps_left
            self._limit = self._end + demand.episodes * self._rounds_ahead
        else:
            self._end = self._limit = math.inf
            self._goal = min(self._steps_due, self._steps_left)

    def _may_start(self) -> bool:
        """True when another episode may start.

        This is asked anew for each episode, with the newest lengths: while a policy learns to live longer, an estimate
        that is one update old grants far more steps than were demanded."""
        if self._next < self._sure_end:
            return True
        return self._next < self._limit and self._is_below_capacity()

    def _is_below_capacity(self) -> bool:
        """True when both conditions for another episode hold: see the class."""
        capacity = min(self._steps_due + self._steps_ahead, self._steps_left)
        if capacity == math.inf:
            return True
        running = len(self._started) - len(self._finished)
        # F + E · u < C
        if self._finished_steps + self._lengths.expected * running >= capacity:
            return False
        # F + L · max(0, u − (n − 1)) < C, where L may be infinite
        counted = running - (self.num_envs - 1)
        return self._finished_steps + (self._lengths.longest * counted if counted > 0 else 0.0) < capacity

    def next(self) -> int | None:
        """Return an episode that may start now, or None."""
        if self._to_rerun:
            self.totals.episodes_rerun += 1
            return self._to_rerun.popleft()
        if not self._may_start():
            return None
        number = self._next
        self._next += 1
        self._started[number] = self.version
        self.totals.episodes_started += 1
        return number

    def seconds_to_next(self) -> None:
        """Only the learner can change what may start, so there is no time to wait for."""

    def finish(self, number: int, segment: Segment, importance: float = 0.0) -> None:
        if number < self._oldest:
            return
        if number not in self._started or number in self._finished:
            raise RuntimeError(f"episode {number} was delivered but is not running")
        self._finished[number] = segment
        self._finished_steps += segment.num_steps
        self._settle()
        self.totals.episodes_delivered += 1
        self.totals.steps_delivered += segment.num_steps
        self.totals.busy_seconds += segment.seconds

    def lost(self, number: int) -> None:
        """Run an episode again, with the same seeds, because its worker was lost."""
        if number >= self._oldest:
            self._to_rerun.append(number)

    def give_up(self, number: int) -> None:
        """Leave an episode out that fails each time. Its round goes on with one less."""
        if number >= self._oldest:
            del self._started[number]
            self._given_up.add(number)
            self._settle()
            self.totals.episodes_dropped += 1

    def _settle(self) -> None:
        """Move `_settled_end` to the first episode that has not finished."""
        lengths = []
        while self._settled_end in self._finished or self._settled_end in self._given_up:
            if self._settled_end in self._finished:
                lengths.append(self._finished[self._settled_end].num_steps)
            self._settled_end += 1
        if lengths:
            self._settled_steps += sum(lengths)
            self._lengths.note(lengths)

    def counts(self) -> Counts:
        return replace(self.totals, episodes_in_flight=len(self._started), episodes_settled=self._first)

    def take(self) -> list[Segment] | None:
        """Return the round in the order of its episodes, or None while some of it is not finished."""
        if self._settled_steps < self._goal and self._settled_end < self._end:
            return None
        oldest_end = self._too_old_next_time()
        if self._settled_end < oldest_end:
            return None
        end, num_steps = self._first, 0
        while end < self._end and num_steps < self._goal:
            num_steps += self._finished[end].num_steps if end in self._finished else 0
            end += 1
        return self._take_until(max(end, oldest_end))

    def take_arrived(self) -> list[Segment]:
        """Return what is finished, in order, without waiting."""
        return self._take_until(self._settled_end)

    def _too_old_next_time(self) -> int:
        """Return the number below which episodes must be taken now.

        After one more update they would be older than the lag allows. They can make a round longer when the demand has
        become smaller."""
        return next(self._due(), self._first - 1) + 1

    def _due(self) -> Iterator[int]:
        """Yield, from the newest on, what would be older than the lag allows after one more update."""
        if self._max_lag is None:
            return
        # Units start in the order of their numbers, so the versions at their start are in order too.
        newest_version = self.version - self._max_lag
        yield from (number for number in reversed(self._started) if self._started[number] <= newest_version)

    def _take_until(self, end: int) -> list[Segment]:
        numbers = [number for number in range(self._first, end) if number not in self._given_up]
        self._given_up = {number for number in self._given_up if number >= end}
        self._first = end
        segments = self._hand_over(numbers)
        self._settled_steps -= sum(segment.num_steps for segment in segments)
        return segments

    def _hand_over(self, numbers: Sequence[int]) -> list[Segment]:
        """Return finished units that the learner takes now."""
        segments = [self._finished.pop(number) for number in numbers]
        for number in numbers:
            del self._started[number]
        num_steps = sum(segment.num_steps for segment in segments)
        self._finished_steps -= num_steps
        # A round may hold more steps than were due, because episodes are taken whole.
        self._steps_due = max(0.0, self._steps_due - num_steps)
        self._steps_left = max(0.0, self._steps_left - num_steps)
        return segments
