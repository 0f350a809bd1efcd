"""Prometheus: serves the newest record at http://HOST:PORT/metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from freerun.core import RequiredPackage, TrackerTraits, UserError
from freerun.telemetry.tracking import TrackedRun

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

LABELS = ("env", "algo", "mode", "seed")


class Prometheus:
    """A sink that only keeps the newest record. A request builds its answer from that record, on its own thread."""

    traits = TrackerTraits(
        description="an endpoint /metrics, for those who watch a cluster",
        package=RequiredPackage("prometheus_client", "its client", "prometheus"),
        destination_setting="prometheus_host",
        local_destinations=("127.0.0.1", "localhost", "::1"),
    )

    def __init__(self, run: TrackedRun):
        # Here and not above: `freerun list` reads the traits also where the package is missing.
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = {name: str(run.config[name]) for name in LABELS}
        self._newest: Mapping[str, float] = {}
        # A registry of its own: the library's global one would add metrics of the Python process and outlive the run.
        registry = CollectorRegistry()
        registry.register(self)  # it needs `collect` and nothing else
        host, port = run.tracking.prometheus_host, run.tracking.prometheus_port
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(
                f"--track prometheus cannot listen on {host}:{port}: {error.strerror}; choose another --prometheus-port"
            ) from None
        self.port = self._server.server_port

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # A new dict takes the place of the old one in one store, so a request that runs meanwhile needs no lock.
        self._newest = {"env_steps": step, **metrics}

    def collect(self) -> Iterator[Any]:
        """Called by the client library for each request."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        for full_name, value in self._newest.items():
            name, _, lag = full_name.partition("/")  # lag_share/0, lag_share/1, …
            labels = {**self._labels, **({"lag": lag} if lag else {})}
            # Prometheus allows only letters, digits and underscores in names.
            name = "freerun_" + re.sub(r"\W", "_", name)
            if math.isfinite(value):
                family = families.setdefault(name, GaugeMetricFamily(name, full_name, labels=list(labels)))
                family.add_metric(list(labels.values()), value)
        return iter(families.values())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
