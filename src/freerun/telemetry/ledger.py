"""The ledger accounts for every episode, and its sums must balance at any time.

An episode passes through these states. The ledger counts those after the hand-over, the collector (`Counts`) the
others:

    started -> in flight -> handed over in part ("open") -> handed over whole ("untrained") -> trained
                   |                  |
                   v                  v
                dropped      given up ("cut"), or broken

- in flight: a worker plays it, or it waits for the rest of its round. The learner has none of its steps.
- dropped:   none of its steps will ever reach the learner.
- open:      the learner has its first steps, and the rest will follow.
- given up:  the learner has its first steps, and the rest will never come.
- broken:    steps in its middle are missing, so that its return and length will never be known.
- untrained: the learner has all of its steps, and the next update will learn from the last of them.
- trained:   an update has learned from all of its steps.

Each episode is in exactly one state, so after every update

    started = trained + untrained + open + given up + broken + dropped + in flight

where `started`, `dropped` and `in flight` come from the collector and the rest from here. The two sides count
independently, so an episode that is lost or trained twice shows as a sum that does not balance.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from freerun.core import AnySegment, Counts, Metrics, Segment, StartPoint, TensorSegment

NUM_RECENT_EPISODES = 100
Pieces = list[list[list[int]]]
"""A segment in short: for each of its columns, a list of [episode, number of steps, version], in order of time."""


class SimulatedSteps(NamedTuple):
    """What is counted of a segment on a device: the returns and lengths of ended episodes are copied to the host."""

    version: int
    num_steps: int
    returns: list[float]
    lengths: list[int]
    place: tuple[int, int]
    """The worker, and the number of the segment among those of this worker."""
    versions_played: tuple[int, ...]

    @classmethod
    def of(cls, segment: TensorSegment) -> SimulatedSteps:
        ended = segment.ended
        returns, lengths = segment.episode_return[ended].tolist(), segment.episode_length[ended].tolist()
        place = (segment.worker, segment.number)
        return cls(segment.version, segment.num_steps, returns, lengths, place, segment.versions_played)


class LineWriter(Protocol):
    """A file that takes one line of text at a time, with its line break."""

    def write(self, line: str) -> object: ...


class Ledger:
    """Counts what was handed to the learner and what it was trained on, by version and by length."""

    def __init__(self, file: LineWriter | None = None, first_episode: int = 0):
        self.version = 0
        """The number of updates so far."""
        self.steps = 0
        """Steps that were handed over."""
        self.episodes = 0
        """Episodes that were handed over whole."""
        self.episodes_trained = 0
        self.num_broken = 0
        """Episodes that were handed over with steps missing."""
        self.lag_max = 0
        self.newest_segments: list[Segment] = []
        """The segments that the last update has learned from, or that the next one will learn from."""
        self.seconds_before = 0.0
        """The wall time that the run had taken when it was resumed."""
        self._file = file
        self._lag_sum = 0  # over all steps
        self._update_lags: Counter[int] = Counter()  # steps by lag, since the last update
        self.recent_episodes: deque[tuple[float, int]] = deque(maxlen=NUM_RECENT_EPISODES)
        """Return and length of the last episodes that were handed over whole."""
        self._open: dict[int, tuple[float, int]] = {}  # by episode: return and length so far
        self._untrained: list[tuple[int, int, int]] = []  # episode, version of its last step, length
        self._untrained_lengths: list[int] = []  # tensor environments do not number their episodes
        self._steps_by_version: Counter[int] = Counter()
        self._episodes_by_length: Counter[int] = Counter()
        # Trained episodes as one number and a few exceptions: every episode below `_trained_until` is trained or will
        # never be, and `_trained_beyond` holds the trained ones above it. So memory does not grow with the run.
        self._trained_until = first_episode
        self._trained_beyond: set[int] = set()
        self._broken: set[int] = set()  # broken episodes that may still hand over steps
        self._num_given_up = 0
        self._next_episode = first_episode  # above every episode that was handed over
        self._segments: list[Pieces] = []  # for the next line of the file
        self._tensor_segments: list[list[Any]] = []  # the same for tensors: worker, number, steps, versions played

    def write_to(self, file: LineWriter) -> None:
        """Write a line for every update from now on that says what the update has learned from."""
        self._file = file

    def account(self, segments: Sequence[AnySegment]) -> None:
        """Count what the collector has handed over."""
        if not self._update_lags:  # these are the first segments since the last update
            self.newest_segments = []
        for segment in segments:
            if isinstance(segment, TensorSegment):
                self._account_simulated(SimulatedSteps.of(segment))
                continue
            self.steps += segment.num_steps
            self.newest_segments.append(segment)
            self._next_episode = max(self._next_episode, int(segment.episode.max()) + 1)
            if self._file is not None:
                self._segments.append(pieces(segment))
            # New weights can arrive in the middle of a segment, so its steps may have several versions.
            for version, num_steps in Counter(segment.version.ravel().tolist()).items():
                self._account_version(version, num_steps)
            # sums[t] is the sum of the rewards before step t: the return from step a to step b is sums[b] - sums[a].
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
        """Count steps by the version of the weights that chose their actions."""
        self._steps_by_version[version] += num_steps
        # Lag of a step: the learner's version when the step arrives minus the version that chose its action.
        lag = self.version - version
        self._update_lags[lag] += num_steps
        self._lag_sum += lag * num_steps
        self.lag_max = max(self.lag_max, lag)

    def _account_simulated(self, steps: SimulatedSteps) -> None:
        """Count a segment of environments that are tensors."""
        self.steps += steps.num_steps
        self._account_version(steps.version, steps.num_steps)
        if self._file is not None:
            self._tensor_segments.append([*steps.place, steps.num_steps, list(steps.versions_played)])
        self.episodes += len(steps.lengths)
        self.recent_episodes.extend(list(zip(steps.returns, steps.lengths, strict=True))[-NUM_RECENT_EPISODES:])
        self._untrained_lengths += steps.lengths

    def _extend(
        self, segment: Segment, column: int, start: int, end: int, sums: NDArray[np.float64], has_ended: bool
    ) -> None:
        """Add the steps from `start` to `end` of one column to their episode."""
        number = segment.episode.item(start, column)
        if segment.after_gap is not None and segment.after_gap.item(start, column):
            self._break(number)
            return
        total, length = self._open.pop(number, (0.0, 0))
        total += sums.item(end, column) - sums.item(start, column)
        length += end - start
        if has_ended:
            self.episodes += 1
            self.recent_episodes.append((total, length))
            self._untrained.append((number, segment.version.item(end - 1, column), length))
        else:
            self._open[number] = (total, length)

    def _break(self, number: int) -> None:
        """Count an episode as broken, once: steps of it are missing."""
        if number not in self._broken:
            self._broken.add(number)
            self.num_broken += 1
            self._open.pop(number, None)

    def lag_metrics(self) -> Metrics:
        """Return the lag of the steps of this update: mean, maximum, and the share of steps with each lag."""
        total = max(1, sum(self._update_lags.values()))
        return {
            "lag_mean": sum(lag * num_steps for lag, num_steps in self._update_lags.items()) / total,
            "lag_max": float(max(self._update_lags, default=0)),
            **{f"lag_share/{lag}": num_steps / total for lag, num_steps in sorted(self._update_lags.items())},
        }

    @property
    def has_untrained_steps(self) -> bool:
        """True from the first steps that are handed over until the update that learns from them."""
        return bool(self._update_lags)

    def finish_update(self, progress: float = 0.0) -> None:
        """Note that an update has learned from everything handed over. The next version begins."""
        self._update_lags.clear()
        for number, _, length in self._untrained:
            if number < self._trained_until or number in self._trained_beyond:
                raise RuntimeError(f"episode {number} was trained twice")
            self._trained_beyond.add(number)
            self._episodes_by_length[length] += 1
        # Episodes may end in any order. As soon as the lowest gap is filled, the numbers above it need not be kept.
        while self._trained_until in self._trained_beyond:
            self._trained_beyond.remove(self._trained_until)
            self._trained_until += 1
        self._episodes_by_length.update(self._untrained_lengths)
        self.episodes_trained += len(self._untrained) + len(self._untrained_lengths)
        # Written before the next update begins, so the file is complete up to the newest checkpoint.
        if self._file is not None:
            line: dict[str, Any] = {"update": self.version + 1, "progress": progress, "segments": self._segments}
            if self._untrained_lengths:
                line["num_episodes"] = len(self._untrained_lengths)
            if self._tensor_segments:
                line["tensors"] = self._tensor_segments
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._segments, self._tensor_segments = [], []
        self._untrained, self._untrained_lengths = [], []
        self.version += 1

    def check_balance(self, counts: Counts) -> None:
        """Raise RuntimeError if the ledger and the collector's own counts do not add up."""
        if not self._untrained:
            self._forget(counts.episodes_settled)
        # started = trained + untrained + open + given up + broken + dropped + in flight
        accounted = (
            self.episodes_trained
            + len(self._untrained)
            + len(self._untrained_lengths)
            + len(self._open)
            + self._num_given_up
            + self.num_broken
            + counts.episodes_dropped
            + counts.episodes_in_flight
        )
        if counts.episodes_started != accounted:
            raise RuntimeError(
                f"the ledger does not balance: {counts.episodes_started} started, {self.summary(counts)}"
            )

    def _forget(self, settled: int) -> None:
        """Keep only a count of the episodes below `settled`: nothing more of them will be handed over.

        A mode that drops steps leaves many open episodes behind, so memory would grow without this.
        """
        given_up = [number for number in self._open if number < settled]
        self._num_given_up += len(given_up)
        for number in given_up:
            del self._open[number]
        self._broken = {number for number in self._broken if number >= settled}
        self._trained_beyond = {number for number in self._trained_beyond if number >= settled}
        self._trained_until = max(self._trained_until, settled)

    def start_point(self, counts: Counts) -> StartPoint:
        """Return where a run begins that continues from this ledger, with the counts of the collector before it.

        Episodes in flight are run again under new numbers. Open ones are given up: their first steps were trained, and
        the environments that could play the rest are gone.
        """
        self._num_given_up += len(self._open)
        self._open, self._broken, self._trained_beyond = {}, set(), set()
        self._trained_until = self._next_episode
        # With nothing open, untrained or in flight, the balance is: started = trained + given up + broken + dropped.
        started = self.episodes_trained + self._num_given_up + self.num_broken + counts.episodes_dropped
        counts = replace(
            counts,
            episodes_started=started,
            episodes_in_flight=0,
            episodes_cut=self._num_given_up,
            episodes_rerun=counts.episodes_rerun + counts.episodes_in_flight,
            episodes_settled=0,
            episodes_delivered=self.episodes,
            steps_delivered=self.steps,
            step_calls=None,
        )
        return StartPoint(self._next_episode, counts, tuple(length for _, length in self.recent_episodes))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Call it only while there are no untrained steps, for these are not in
        it."""
        # These keys are the format of checkpoints. They begin with an underscore where an attribute once did.
        return {
            "version": self.version,
            "steps": self.steps,
            "episodes": self.episodes,
            "episodes_trained": self.episodes_trained,
            "broken": self.num_broken,
            "lag_max": self.lag_max,
            "_lag_sum": self._lag_sum,
            "_recent": self.recent_episodes,
            "_open": self._open,
            "_steps_by_version": self._steps_by_version,
            "_episodes_by_length": self._episodes_by_length,
            "_trained_beyond": self._trained_beyond,
            "_trained_until": self._trained_until,
            "_broken": self._broken,
            "_num_given_up": self._num_given_up,
            "_next_episode": self._next_episode,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.steps = int(state["steps"])
        self.episodes = int(state["episodes"])
        self.episodes_trained = int(state["episodes_trained"])
        self.num_broken = int(state["broken"])
        self.lag_max = int(state["lag_max"])
        self._lag_sum = int(state["_lag_sum"])
        self.recent_episodes = deque((tuple(entry) for entry in state["_recent"]), NUM_RECENT_EPISODES)
        self._open = {number: (total, length) for number, (total, length) in dict(state["_open"]).items()}
        self._steps_by_version = Counter(state["_steps_by_version"])
        self._episodes_by_length = Counter(state["_episodes_by_length"])
        self._trained_beyond = set(state["_trained_beyond"])
        self._trained_until = int(state["_trained_until"])
        self._broken = set(state["_broken"])
        self._num_given_up = int(state["_num_given_up"])
        self._next_episode = int(state["_next_episode"])

    @property
    def mean_return(self) -> float:
        """The mean return of the last 100 episodes; NaN before the first has ended."""
        return float(np.mean([total for total, _ in self.recent_episodes])) if self.recent_episodes else float("nan")

    @property
    def mean_length(self) -> float:
        """The mean length of the last 100 episodes; NaN before the first has ended."""
        return float(np.mean([length for _, length in self.recent_episodes])) if self.recent_episodes else float("nan")

    @property
    def lag_mean(self) -> float:
        """The mean lag of all steps of the run."""
        return self._lag_sum / max(1, self.steps)

    def summary(self, counts: Counts) -> dict[str, Any]:
        """Return the part of summary.json that is named `ledger`."""
        return {
            "started": counts.episodes_started,
            "trained": self.episodes_trained,
            "handed_over_untrained": (
                len(self._untrained) + len(self._open) + self._num_given_up - counts.episodes_cut
            ),
            "cut": counts.episodes_cut,
            "broken": self.num_broken,
            "dropped": counts.episodes_dropped,
            "rerun": counts.episodes_rerun,
            "in_flight": counts.episodes_in_flight,
            "steps_by_version": {str(version): steps for version, steps in sorted(self._steps_by_version.items())},
            "episodes_by_length": {str(length): num for length, num in sorted(self._episodes_by_length.items())},
        }


def pieces(segment: Segment) -> Pieces:
    """Return what it takes to play the segment again. Randomness belongs to the episode, so this is enough."""
    episode, version = segment.episode, segment.version
    if segment.after_gap is not None:
        # In ledger.jsonl, an episode is written as −1 − number where steps before are missing.
        episode = np.where(segment.after_gap, -1 - episode, episode)
    changes = (episode[1:] != episode[:-1]) | (version[1:] != version[:-1])
    # A piece ends where the episode or the version changes from one step to the next.
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
