"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import preloaded_python
import preloaded_servers
import pytest
import torch
from hypothesis import HealthCheck, settings

from freerun.collecting.workers import restart_policy
from freerun.settings import registry
from freerun.tools.bench import bench_cases
from freerun.transport import processes, slots

# Tests measure nothing: on a busy machine an example may take as long as it likes.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
# Runs that tests start inherit ignored signals, and a shell's background jobs ignore these two.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Before the first worker of the session starts, as `experiment.run` would.
torch.set_num_threads(1)  # as in a run: threads that wait for each other are slow where cores are shared
slots.POISON = True
processes.preload([*registry.WORKER_MODULES, "toy_envs"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Say which tests one process must run together (`--dist loadgroup`), and let the longest ones start first.

    A file stays together, because its tests share fixtures; a slow test stands alone, so that no process is left with
    several of them at the end; all that needs the Ray of `ray_nodes` stays together, because it takes long to start.
    """
    for item in items:
        if _needs_ray(item):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    # The tests with Ray come first: they are the longest group, and one process runs them one after another.
    items.sort(key=lambda item: (not _needs_ray(item), item.get_closest_marker("slow") is None))
    yield
    for item in items:
        # xdist 3.8 appends the group to `_nodeid`, but from pytest 9.2 on the name of a test is in `_id`. Without this
        # every test would be a group of its own: three processes would start a Ray each, and share no fixture.
        named = getattr(item, "_nodeid", item.nodeid)
        if named != item.nodeid:
            item._id = type(item.id).parse(named)


def _needs_ray(item: pytest.Item) -> bool:
    """True if a test asks for the Ray of `ray_nodes`, or is given the mode of that name."""
    if item.get_closest_marker("own_ray") is not None:
        return False
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    is_given = any(isinstance(value, str) and value == "ray" for value in parameters)
    return is_given or "ray_nodes" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session", autouse=True)
def _key_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are signed with a key of this session, not with the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_starter_is_left() -> Iterator[None]:
    """The process that starts programs for tests ends with the session."""
    yield
    preloaded_python.stop()


@pytest.fixture(autouse=True)
def _a_logger_that_no_other_test_has_changed() -> None:
    """Three tests saw nothing of what freerun had logged, but only after certain others in the same process."""
    logging.disable(logging.NOTSET)
    logger = logging.getLogger("freerun")
    logger.disabled, logger.propagate = False, True
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that fails again and again is started again at once: eight failures would otherwise take 6 seconds.

    tests/collecting/test_restart_policy.py checks how the pauses grow, without waiting for them.
    """
    monkeypatch.setattr(restart_policy, "MAX_PAUSE_SECONDS", 0.05)


@pytest.fixture
def quick_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further learners and trainers that a run in this process starts need not import torch."""
    monkeypatch.setattr(processes, "server_context", preloaded_servers.ServerContext)


@pytest.fixture
def preloaded_bench_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of a bench are processes as always, but need not import torch."""

    def start_python(words: Sequence[str], output: IO[str], errors: IO[str]) -> preloaded_python.Process:
        return preloaded_python.Process(
            words, stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True
        )

    monkeypatch.setattr(bench_cases, "start_python", start_python)


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Any]:
    """A private Ray with one node, started once: it takes longer than most tests. Nodes that a test adds it removes."""
    import ray
    from ray.cluster_utils import Cluster

    from freerun.collecting.ray.ray_cluster import private_environment

    # A node that is gone is noticed after some two seconds instead of twenty.
    soon = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 1000}
    head = {"num_cpus": 8, "include_dashboard": False, "_system_config": {**soon, "health_check_failure_threshold": 3}}
    with private_environment():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _ray_where_it_is_needed(request: pytest.FixtureRequest) -> None:
    if _needs_ray(request.node):
        request.getfixturevalue("ray_nodes")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real one, the system's; for `make test-browser`."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "no Chromium: apt-get install chromium"
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield found
        found.close()
