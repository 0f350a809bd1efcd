"""The ledger: every episode is accounted for, and the sums must balance at any time."""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freerun.core import AnySegment, Counts, Metrics, Segment, Start, TensorSegment

RECENT_EPISODES = 100


STATE = (
    "version",
    "steps",
    "episodes",
    "episodes_trained",
    "broken",
    "lag_max",
    "_lag_sum",
    "_recent",
    "_open",
    "_steps_by_version",
    "_episodes_by_length",
    "_trained_beyond",
    "_trained_until",
    "_broken",
    "_num_given_up",
    "_next_episode",
    "_last_round",
)
Pieces = list[list[list[int]]]
"""Of one segment: for each of its columns, the [episode, steps, version] that follow each other in it."""


class Lines(Protocol):
    def write(self, line: str) -> object: ...


class Ledger:
    """What was handed to the learner and what was trained, by version and by length."""

    def __init__(self, file: Lines | None = None, first_episode: int = 0):
        self.version = 0
        self.steps = 0
        self.episodes = 0
        self.episodes_trained = 0
        self.broken = 0  # episodes that were handed over with steps missing
        self.lag_max = 0
        self._lag_sum = 0
        self._update_lags: Counter[int] = Counter()
        self._file = file
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)
        self._open: dict[int, tuple[float, int]] = {}  # return and length so far of episodes that have not ended
        self._untrained: list[tuple[int, int, int]] = []  # episode, version of its last step, length
        self._untrained_lengths: list[int] = []  # of episodes that have no number: those of tensor environments
        self._steps_by_version: Counter[int] = Counter()
        self._episodes_by_length: Counter[int] = Counter()
        self._trained_beyond: set[int] = set()
        self._trained_until = first_episode  # every episode below this was trained, or will never be
        self._broken: set[int] = set()  # of which more may come
        self._num_given_up = 0  # open ones of which no more will
        self._next_episode = first_episode  # above all that were handed over
        self._last_round = (0, 0)  # steps and episodes of the last update
        self._segments: list[Pieces] = []  # of the next one
        self.newest: list[Segment] = []
        """What the last update learned from, or the next one will."""
        self.seconds_before = 0.0
        """That the run had taken when it was resumed."""

    def write_to(self, file: Lines) -> None:
        """From now on, a line there says what each update has learned from."""
        self._file = file

    def account(self, segments: Sequence[AnySegment]) -> None:
        """Note what the collector has handed over."""
        if not self._update_lags:  # the first of an update
            self.newest = []
        for segment in segments:
            self.steps += segment.num_steps
            if isinstance(segment, TensorSegment):
                self._account_tensors(segment)
                continue
            self.newest.append(segment)
            self._next_episode = max(self._next_episode, int(_number(segment.episode).max()) + 1)
            if self._file is not None:
                self._segments.append(pieces(segment))
            for version, num_steps in Counter(segment.version.ravel().tolist()).items():
                self._account_version(version, num_steps)
            num_steps, ended = len(segment.reward), segment.ended
            sums = np.zeros((num_steps + 1, segment.reward.shape[1]))
            np.cumsum(segment.reward, axis=0, dtype=np.float64, out=sums[1:])
            for column in range(segment.reward.shape[1]):
                start = 0
                for last in np.flatnonzero(ended[:, column]).tolist():
                    self._extend(segment, column, start, last + 1, sums, has_ended=True)
                    start = last + 1
                if start < num_steps:
                    self._extend(segment, column, start, num_steps, sums, has_ended=False)

    def _account_version(self, version: int, num_steps: int) -> None:
        self._steps_by_version[version] += num_steps
        lag = self.version - version
        self._update_lags[lag] += num_steps
        self._lag_sum += lag * num_steps
        self.lag_max = max(self.lag_max, lag)

    def _account_tensors(self, segment: TensorSegment) -> None:
        """Only the returns and lengths of episodes that have ended leave the device."""
        self._account_version(segment.version, segment.num_steps)
        ended = segment.ended
        returns, lengths = segment.episode_return[ended].tolist(), segment.episode_length[ended].tolist()
        self.episodes += len(lengths)
        self._recent.extend(list(zip(returns, lengths, strict=True))[-RECENT_EPISODES:])
        self._untrained_lengths += lengths

    def _extend(
        self, segment: Segment, column: int, start: int, end: int, sums: NDArray[np.float64], has_ended: bool
    ) -> None:
        """Add these steps to their episode."""
        number = segment.episode.item(start, column)
        if number < 0:
            self._break(int(_number(number)))
            return
        total, length = self._open.pop(number, (0.0, 0))
        total += sums.item(end, column) - sums.item(start, column)
        length += end - start
        if has_ended:
            self.episodes += 1
            self._recent.append((total, length))
            self._untrained.append((number, segment.version.item(end - 1, column), length))
        else:
            self._open[number] = (total, length)

    def _break(self, number: int) -> None:
        """Steps of the episode are missing: its return and length will never be known."""
        if number not in self._broken:
            self._broken.add(number)
            self.broken += 1
            self._open.pop(number, None)

    def lags(self) -> Metrics:
        """How old the steps of this update are: mean, maximum, and the share of each lag."""
        total = max(1, sum(self._update_lags.values()))
        return {
            "lag_mean": sum(lag * num_steps for lag, num_steps in self._update_lags.items()) / total,
            "lag_max": float(max(self._update_lags, default=0)),
            **{f"lag_share/{lag}": num_steps / total for lag, num_steps in sorted(self._update_lags.items())},
        }

    @property
    def is_even(self) -> bool:
        """Everything that was handed over has been trained: a moment to keep."""
        return not self._update_lags

    def trained(self, progress: float = 0.0) -> None:
        """An update has learned from everything handed over: the next version begins."""
        self._last_round = (sum(self._update_lags.values()), len(self._untrained))
        self._update_lags.clear()
        for number, _, length in self._untrained:
            if number < self._trained_until or number in self._trained_beyond:
                raise RuntimeError(f"episode {number} was trained twice")
            self._trained_beyond.add(number)
            self._episodes_by_length[length] += 1
        while self._trained_until in self._trained_beyond:
            self._trained_beyond.remove(self._trained_until)
            self._trained_until += 1
        self._episodes_by_length.update(self._untrained_lengths)
        self.episodes_trained += len(self._untrained) + len(self._untrained_lengths)
        if self._file is not None:
            line: dict[str, Any] = {"update": self.version + 1, "progress": progress, "segments": self._segments}
            if self._untrained_lengths:
                line["num_episodes"] = len(self._untrained_lengths)
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._segments = []
        self._untrained, self._untrained_lengths = [], []
        self.version += 1

    def check_balance(self, counts: Counts) -> None:
        """started = trained + handed over + dropped + in flight, from two sets of books."""
        if not self._untrained:
            self._forget(counts.episodes_settled)
        accounted = self.episodes_trained + len(self._untrained) + len(self._open) + self._num_given_up + self.broken
        accounted += len(self._untrained_lengths)
        accounted += counts.episodes_dropped + counts.episodes_in_flight
        if counts.episodes_started != accounted:
            raise RuntimeError(
                f"the ledger does not balance: {counts.episodes_started} started, {self.summary(counts)}"
            )

    def _forget(self, settled: int) -> None:
        """What will not be heard of again need only be counted: a mode that drops leaves many such behind."""
        given_up = [number for number in self._open if number < settled]
        self._num_given_up += len(given_up)
        for number in given_up:
            del self._open[number]
        self._broken = {number for number in self._broken if number >= settled}
        self._trained_beyond = {number for number in self._trained_beyond if number >= settled}
        self._trained_until = max(self._trained_until, settled)

    def start(self, counts: Counts) -> Start:
        """Where the next run begins that goes on from here; what was under way is run again, or stays cut."""
        self._num_given_up += len(self._open)
        self._open, self._broken, self._trained_beyond = {}, set(), set()
        self._trained_until = self._next_episode
        started = self.episodes_trained + self._num_given_up + self.broken + counts.episodes_dropped
        counts = replace(
            counts,
            episodes_started=started,
            episodes_in_flight=0,
            episodes_cut=self._num_given_up,
            episodes_rerun=counts.episodes_rerun + counts.episodes_in_flight,
            episodes_settled=0,
            episodes_delivered=self.episodes,
            steps_delivered=self.steps,
        )
        return Start(self._next_episode, counts, self._last_round, tuple(length for _, length in self._recent))

    def state_dict(self) -> dict[str, Any]:
        """Only at an even moment: nothing is half done."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            value, kind = state[name], type(getattr(self, name))
            value = [tuple(entry) for entry in value] if name == "_recent" else value
            setattr(self, name, deque(value, RECENT_EPISODES) if kind is deque else kind(value))
        self._open = {number: (total, length) for number, (total, length) in self._open.items()}

    @property
    def mean_return(self) -> float:
        """Over the last 100 episodes; NaN before the first."""
        return float(np.mean([total for total, _ in self._recent])) if self._recent else float("nan")

    @property
    def mean_length(self) -> float:
        return float(np.mean([length for _, length in self._recent])) if self._recent else float("nan")

    @property
    def lag_mean(self) -> float:
        return self._lag_sum / max(1, self.steps)

    def summary(self, counts: Counts) -> dict[str, Any]:
        return {
            "started": counts.episodes_started,
            "trained": self.episodes_trained,
            "handed_over_untrained": (
                len(self._untrained) + len(self._open) + self._num_given_up - counts.episodes_cut
            ),
            "cut": counts.episodes_cut,
            "broken": self.broken,
            "dropped": counts.episodes_dropped,
            "rerun": counts.episodes_rerun,
            "in_flight": counts.episodes_in_flight,
            "steps_by_version": {str(version): steps for version, steps in sorted(self._steps_by_version.items())},
            "episodes_by_length": {str(length): num for length, num in sorted(self._episodes_by_length.items())},
        }


def _number(episode: Any) -> Any:
    """Of an episode whose number is negated where steps before are missing."""
    return np.maximum(episode, -1 - episode)


def pieces(segment: Segment) -> Pieces:
    """What it takes to play it again: randomness belongs to the episode, so nothing else is missing."""
    episode, version = segment.episode, segment.version
    changes = (episode[1:] != episode[:-1]) | (version[1:] != version[:-1])
    columns = []
    for column in range(episode.shape[1]):
        starts = [0, *(np.flatnonzero(changes[:, column]) + 1).tolist(), len(episode)]
        columns.append(
            [
                [episode.item(first, column), stop - first, version.item(first, column)]
                for first, stop in itertools.pairwise(starts)
            ]
        )
    return columns
