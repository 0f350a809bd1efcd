"""The metrics of a run as curves of bounded size: when there are too many points, neighbours are averaged."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from freerun.core import Array
from freerun.persistence.metric_records import MOST_NAMES, read_record

# At most nine digits: a longer number in a crafted file would cost time and memory.
LAG_SHARE = re.compile(r"lag_share/\d{1,9}", re.ASCII)
MOST_POINTS = 2000


class Curves:
    """One row for each point, with the means of the updates that it stands for. NaN marks a missing metric."""

    def __init__(self, most_points: int = MOST_POINTS):
        self._rows: Array = np.full((2 * most_points, 0), np.nan)
        self._names: dict[str, int] = {}
        self._num_points = 0
        self.updates_per_point = 1
        """The number of updates that a point stands for."""
        self._pending: list[Mapping[str, float | None]] = []
        self.num_updates = 0
        self.newest: dict[str, float | None] = {}
        self.lag_steps: dict[int, float] = {}
        """The number of steps for each lag of their weights."""
        self._last_step = 0.0

    def add_line(self, line: str | bytes) -> None:
        """Add one line of metrics.jsonl, which is one update."""
        record = read_record(line)
        self.num_updates += 1
        self.newest = record
        self._count_lags(record)
        self._pending.append(record)
        if len(self._pending) >= self.updates_per_point:
            self._add_point()

    def _count_lags(self, record: dict[str, float | None]) -> None:
        """Move the shares of each lag out of the record: there may be so many that they would fill the rows."""
        step = record.get("step") or 0.0
        for name in [name for name in record if LAG_SHARE.fullmatch(name)]:
            lag = int(name.partition("/")[2])
            # steps with this lag += share of the update's steps * steps of the update
            self.lag_steps[lag] = self.lag_steps.get(lag, 0.0) + (record.pop(name) or 0.0) * (step - self._last_step)
        self._last_step = step

    def _add_point(self) -> None:
        for record in self._pending:
            for name in record:
                # A crafted file could invent a new metric in every line, so their number is limited.
                if name not in self._names and len(self._names) < MOST_NAMES:
                    self._names[name] = len(self._names)
                    self._rows = np.hstack([self._rows, np.full((len(self._rows), 1), np.nan)])
        if self._num_points == len(self._rows):
            self._halve()
            return  # a point stands for twice as many updates now, so the pending ones wait for more
        row = self._rows[self._num_points]
        row[:] = np.nan
        for name, column in self._names.items():
            values = [value for record in self._pending if (value := record.get(name)) is not None]
            if values:
                row[column] = sum(values) / len(values)
        self._num_points += 1
        self._pending = []

    def _halve(self) -> None:
        """Replace each pair of neighbours by its mean, which ignores missing values."""
        pairs = self._rows.reshape(-1, 2, len(self._names))
        is_known = ~np.isnan(pairs)
        sums, num_known = np.where(is_known, pairs, 0.0).sum(axis=1), is_known.sum(axis=1)
        self._rows[: len(pairs)] = np.where(num_known, sums / np.maximum(num_known, 1), np.nan)
        self._num_points = len(pairs)
        self.updates_per_point *= 2

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def columns(self, most_points: int = 600) -> dict[str, list[float | None]]:
        """Return the points of each metric, thinned out to at most `most_points`; the newest is always there."""
        stride = max(1, -(-self._num_points // most_points))  # rounded up
        # Counted from the end, so that the newest point stays.
        rows = self._rows[: self._num_points][::-1][::stride][::-1]
        return {
            # Six digits are more than a chart can show and keep the answer small. JSON has no NaN.
            name: [None if np.isnan(value) else float(f"{value:.6g}") for value in rows[:, column].tolist()]
            for name, column in self._names.items()
        }
