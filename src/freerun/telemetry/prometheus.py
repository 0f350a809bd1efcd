"""Prometheus: the newest record at http://HOST:PORT/metrics, for those who watch a cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from freerun.core import UserError
from freerun.telemetry.tracking import TrackedRun

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError:
    raise UserError("--track prometheus needs its client: pip install 'freerun[prometheus]'") from None

LABELS = ("env", "algo", "mode", "seed")


class Prometheus(Collector):
    """Writing is only remembering: what is asked for is made when it is asked for."""

    def __init__(self, run: TrackedRun):
        self._labels = {name: str(run.config[name]) for name in LABELS}
        self._newest: Mapping[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        host, port = run.tracking.prometheus_host, run.tracking.prometheus_port
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(
                f"--track prometheus cannot listen on {host}:{port}: {error.strerror}; choose another --prometheus-port"
            ) from None
        self.port = self._server.server_port

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._newest = {"env_steps": step, **metrics}

    def collect(self) -> Iterator[Any]:
        families: dict[str, GaugeMetricFamily] = {}
        for full_name, value in self._newest.items():
            name, _, lag = full_name.partition("/")  # lag_share/0, lag_share/1, …
            labels = {**self._labels, **({"lag": lag} if lag else {})}
            name = "freerun_" + re.sub(r"\W", "_", name)
            if math.isfinite(value):
                family = families.setdefault(name, GaugeMetricFamily(name, full_name, labels=list(labels)))
                family.add_metric(list(labels.values()), value)
        return iter(families.values())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
