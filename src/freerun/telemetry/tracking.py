"""What a tracker (TensorBoard, W&B, Prometheus) gets to know about a run, and the thread that it works on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from freerun.core import Common, MetricSink, UserError

MOST_WAITING_RECORDS = 1000
"""If a sink falls further behind, the run waits for it, and no record is lost."""
Record = tuple[int, dict[str, float]]


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go besides the run folder."""

    track: Common[Annotated[tuple[str, ...], tyro.conf.UseAppendAction]] = ()
    """Send metrics to tensorboard, wandb or prometheus too, or to your own tracker as module:Class (the flag may be
    given again)."""
    wandb_project: str = "freerun"
    """Project at Weights & Biases."""
    wandb_entity: str | None = None
    """User or team there (your default if not given)."""
    wandb_group: str | None = None
    """Runs to compare with each other (environment and algorithm if not given: so modes stand side by side)."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline writes into the run folder; `wandb sync` sends it later."""
    prometheus_host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines read the metrics."""
    prometheus_port: int = 9108
    """Port of the endpoint /metrics."""

    def __post_init__(self) -> None:
        if not 0 <= self.prometheus_port < 65536:
            raise UserError(f"--prometheus-port must lie between 0 and 65535, not {self.prometheus_port}")


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker sees it when it is built."""

    path: Path
    config: Mapping[str, Any]
    """All settings by flat names, as in config.json, without secrets."""
    tracking: TrackingConfig
    has_secrets: bool = False
    """True if secrets were left out of the settings. The tracker must not record the command line then: it has them."""


class BackgroundSink:
    """Writes to a slow sink on a thread of its own: TensorBoard and W&B take milliseconds for each record.

    Records keep their order. The next `write` or `close` raises what the sink has raised.
    """

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
        # No lock is needed: both threads only replace one reference. A later failure is raised by a later call.
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
