"""A federation on one machine: sites in processes of their own, and Flower's simulation engine between them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from freerun.core import LearnerFailure, UserError
from freerun.settings.config import AnyConfig
from freerun.settings.registry import find_algorithm
from freerun.tools.federation.federation_options import FederationOptions
from freerun.tools.federation.site_processes import SiteProcesses
from freerun.transport import processes
from freerun.transport.janitor import Janitor

logger = logging.getLogger("freerun")

FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns that this will be its default
}
"""Flower and Ray report to nobody."""
FLOWER_LEAVE_SECONDS = 30.0


@dataclass(frozen=True)
class FederationResult:
    """A federation that has ended."""

    folder: Path
    rounds: list[dict[str, Any]]
    """The figures of every round, as federation.jsonl holds them."""
    run_dirs: dict[str, Path]
    """The run folder of every site. Its policy is the one that all sites have learned together."""


def require_flower() -> None:
    if not all(importlib.util.find_spec(name) for name in ("flwr", "ray")):
        raise UserError(
            "freerun federate needs Flower with its simulation engine, whose pins clash with freerun's own: use an "
            "environment of its own, as `make test-federated` does (docs/federated.md)"
        )


def federate(
    sites: Mapping[str, AnyConfig],
    options: FederationOptions,
    folder: Path,
    on_round: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> FederationResult:
    """Train sites together. Each has a name and its own settings; run folders are made in `folder`."""
    check_sites(sites, options)
    require_flower()
    if (folder / "sites").exists():
        raise UserError(f"{folder} already holds a federation: name another --run-dir")
    run_dirs = {name: folder / "sites" / name for name in sites}
    configs = {name: dataclasses.replace(config, run_dir=run_dirs[name], quiet=True) for name, config in sites.items()}
    options = dataclasses.replace(options, min_sites=options.min_sites or len(sites))
    # Names of sockets must be short, so they lie in a temporary folder, which belongs to this user alone. Ray's files
    # are there, too: the janitor removes all of it, and what Ray has started, even if this process is killed.
    place = Path(tempfile.mkdtemp(prefix="freerun-"))
    janitor = Janitor(place)
    try:
        sockets = {name: place / str(number) for number, name in enumerate(configs)}
        running = SiteProcesses(configs, sockets)
        are_told = False
        try:
            flower = FlowerProcess(tuple(sockets.values()), options, folder, place)
            try:
                follow(flower, running, on_round)
                are_told = True
            finally:
                flower.close()
        finally:
            running.close(are_told)
    finally:
        janitor.clean_up()
    return FederationResult(folder, read_rounds(folder), run_dirs)


def check_sites(sites: Mapping[str, AnyConfig], options: FederationOptions) -> None:
    if not sites:
        raise UserError("a federation needs sites: give --site NAME for each, with the flags that it alone has")
    for name, config in sites.items():
        traits = find_algorithm(config.algo).traits
        if options.strategy == "fedprox" and not traits.has_proximal_term:
            raise UserError(f"--strategy fedprox needs an algorithm with a proximal term: {name} has {config.algo}")
        if options.share == "policy" and not traits.critic_parts:
            raise UserError(f"--share policy needs an algorithm with a critic: {name} has {config.algo}")


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    path = folder / "federation.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def follow(flower: FlowerProcess, running: SiteProcesses, on_round: Callable[[dict[str, Any]], None]) -> None:
    """Watch over a federation until Flower has run all rounds."""
    num_rounds = 0
    while True:
        for ready in wait([flower.connection, *running.connections]):
            if ready is flower.connection:
                figures = flower.hear()
                if figures is None:
                    return
                num_rounds += 1
                on_round(figures)
                continue
            assert isinstance(ready, Connection)
            name, failure = running.hear(ready)
            if failure is not None:
                if num_rounds == 0:  # most likely a mistake in its settings
                    raise LearnerFailure(f"the site {name} has failed: {failure}")
                logger.warning("the federation goes on without %s: %s", name, failure)


class FlowerProcess:
    """Flower's simulation engine, in a process of its own: its logging, its threads and its Ray stay there."""

    def __init__(self, sockets: tuple[Path, ...], options: FederationOptions, folder: Path, ray_folder: Path):
        """`ray_folder` is for Ray's files. Its name must be short, for there are sockets among them."""
        payload = cloudpickle.dumps((sockets, options, folder.absolute(), str(ray_folder)))
        with processes.environment(FLOWER_ENVIRONMENT):  # before it imports Flower
            self._process, self.connection = processes.start_server(_serve_flower, payload)

    def hear(self) -> dict[str, Any] | None:
        """Return the figures of a round, or None after the last one."""
        try:
            kind, content = self.connection.recv()
        except EOFError:
            self._process.join(processes.EXIT_SECONDS)
            raise LearnerFailure(f"Flower's process has died with exit code {self._process.exitcode}") from None
        if kind == "failed":
            raise LearnerFailure(content)
        figures: dict[str, Any] | None = content
        return figures

    def close(self) -> None:
        if self._process.exitcode is None and sys.exc_info()[0] is not None:
            self._process.terminate()
        processes.stop([self._process], FLOWER_LEAVE_SECONDS)


def _serve_flower(connection: Connection, payload: bytes) -> None:
    os.setpgrp()
    processes.end_with_parent()
    from flwr.simulation import run_simulation

    from freerun.tools.federation.client_app import make_client_app
    from freerun.tools.federation.server_app import make_server_app

    logging.getLogger("flwr").setLevel(logging.ERROR)  # rounds are reported by `on_round`
    sockets, options, folder, ray_folder = cloudpickle.loads(payload)
    server = make_server_app(options, folder, lambda figures: connection.send(("round", figures)))
    # A ClientApp only waits for its site, so all of them run at once, whatever the number of cores. A Ray that others
    # have started on this machine is left alone.
    ray_arguments = {"address": "local", "num_cpus": len(sockets), "log_to_driver": False, "_temp_dir": ray_folder}
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {**ray_arguments, "logging_level": logging.ERROR},
    }
    try:
        run_simulation(server, make_client_app(sockets, options), len(sockets), backend_config=backend)
        connection.send(("done", None))
    except (UserError, LearnerFailure) as failure:
        connection.send(("failed", str(failure)))
    except Exception:
        connection.send(("failed", f"Flower's simulation has failed:\n{traceback.format_exc()}"))
