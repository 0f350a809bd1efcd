"""Writes to a slow sink on a thread of its own: TensorBoard and W&B take milliseconds for each record."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from freerun.core import MetricSink

MOST_WAITING_RECORDS = 1000
"""If a sink falls further behind, the run waits for it, and no record is lost."""
Record = tuple[int, dict[str, float]]


class BackgroundSink:
    """Passes records to the sink in order. The next `write` or `close` raises what the sink has raised."""

    def __init__(self, sink: MetricSink):
        self._sink = sink
        self._records: queue.Queue[Record | None] = queue.Queue(MOST_WAITING_RECORDS)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._pass_on, name="freerun-sink", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._raise_failure()
        self._records.put((step, dict(metrics)))  # a copy, for the caller may change its own

    def close(self) -> None:
        self._records.put(None)
        self._thread.join()
        self._sink.close()
        self._raise_failure()

    def _pass_on(self) -> None:
        while (record := self._records.get()) is not None:
            # After a failure the queue must still be emptied, or a `write` that waits for space would wait for ever.
            if self._failure is None:
                try:
                    self._sink.write(*record)
                except Exception as failure:
                    self._failure = failure

    def _raise_failure(self) -> None:
        # The attribute needs no lock: the thread sets it once, before it can be seen here, and never reads it back.
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
