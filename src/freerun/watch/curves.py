"""The metrics of a run as curves that never grow: when there are too many points, neighbours become one."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from freerun.core import Array
from freerun.persistence.records import MOST_NAMES, read_record

LAG_SHARE = re.compile(r"lag_share/\d{1,9}", re.ASCII)
MOST_POINTS = 2000


class Curves:
    """One row per point: means of the updates that it stands for. A metric that an update lacks is NaN there."""

    def __init__(self, most_points: int = MOST_POINTS):
        self._rows: Array = np.full((2 * most_points, 0), np.nan)
        self._names: dict[str, int] = {}
        self._num_points = 0
        self._updates_per_point = 1
        self._pending: list[Mapping[str, float | None]] = []
        self.num_updates = 0
        self.newest: dict[str, float | None] = {}
        self.lag_steps: dict[int, float] = {}
        """Steps by how old their weights were."""
        self._last_step = 0.0

    def add_line(self, line: str | bytes) -> None:
        record = read_record(line)
        self.num_updates += 1
        self.newest = record
        self._count_lags(record)
        self._pending.append(record)
        if len(self._pending) >= self._updates_per_point:
            self._add_point()

    def _count_lags(self, record: dict[str, float | None]) -> None:
        step = record.get("step") or 0.0
        """They leave the record: there may be a great many of them."""
        for name in [name for name in record if LAG_SHARE.fullmatch(name)]:
            lag = int(name.partition("/")[2])
            self.lag_steps[lag] = self.lag_steps.get(lag, 0.0) + (record.pop(name) or 0.0) * (step - self._last_step)
        self._last_step = step

    def _add_point(self) -> None:
        for record in self._pending:
            for name in record:
                if name not in self._names and len(self._names) < MOST_NAMES:
                    self._names[name] = len(self._names)
                    self._rows = np.hstack([self._rows, np.full((len(self._rows), 1), np.nan)])
        if self._num_points == len(self._rows):
            self._halve()
            return  # a point stands for more updates now
        row = self._rows[self._num_points]
        row[:] = np.nan
        for name, column in self._names.items():
            values = [value for record in self._pending if (value := record.get(name)) is not None]
            if values:
                row[column] = sum(values) / len(values)
        self._num_points += 1
        self._pending = []

    def _halve(self) -> None:
        pairs = self._rows.reshape(-1, 2, len(self._names))
        known = ~np.isnan(pairs)
        sums, number = np.where(known, pairs, 0.0).sum(axis=1), known.sum(axis=1)
        self._rows[: len(pairs)] = np.where(number, sums / np.maximum(number, 1), np.nan)
        self._num_points = len(pairs)
        self._updates_per_point *= 2

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def columns(self, most_points: int = 600) -> dict[str, list[float | None]]:
        """By name, thinned out to at most so many points; the newest is always there."""
        stride = max(1, -(-self._num_points // most_points))
        rows = self._rows[: self._num_points][::-1][::stride][::-1]
        return {
            name: [None if np.isnan(value) else float(f"{value:.6g}") for value in rows[:, column].tolist()]
            for name, column in self._names.items()
        }
