"""A sink that takes its time, on a thread of its own: TensorBoard takes milliseconds for a record, W&B too."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from freerun.core import MetricSink

MOST_WAITING = 1000
"""Records. A sink that falls behind further holds the run up rather than lose any."""
Record = tuple[int, dict[str, float]]


class Background:
    """Hands records on in order. What the sink raises is raised by the next `write`, or by `close`."""

    def __init__(self, sink: MetricSink):
        self._sink = sink
        self._records: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._hand_on, name="freerun-sink", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._raise_failure()
        self._records.put((step, dict(metrics)))

    def close(self) -> None:
        self._records.put(None)
        self._thread.join()
        self._sink.close()
        self._raise_failure()

    def _hand_on(self) -> None:
        while (record := self._records.get()) is not None:
            if self._failure is None:  # else go on emptying the queue, or `write` would wait for ever
                try:
                    self._sink.write(*record)
                except Exception as failure:
                    self._failure = failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
