"""The Flower App on a real SuperLink with two SuperNodes, on this machine alone. `make test-federated` runs it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("flwr") is None:
    pytest.skip("Flower is not installed: make test-federated", allow_module_level=True)

import freerun

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
PATIENCE_SECONDS = 300.0
SITE = ["federate", "CartPole-v1", "--mode", "sequential", "--steps-per-update", "200", "--total-steps", "50000"]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
        return port


def environment(home: Path) -> dict[str, str]:
    """Flower's commands find each other by PATH, and gRPC and HTTP must not go through a proxy to this machine."""
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', '')}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(home), "PATH": path, "NO_PROXY": HOST, "no_proxy": HOST}
    return {**variables, **quiet, "PYTHONPATH": str(ROOT / "src")}


@contextlib.contextmanager
def started(commands: dict[str, list[str]], folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """Run commands in the background, each with a log, and end all that they have started."""
    running = []
    with contextlib.ExitStack() as logs:
        try:
            for name, command in commands.items():
                log = logs.enter_context((folder / f"{name}.log").open("wb"))
                # A group of its own: Flower's commands start others.
                running.append(
                    subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True, cwd=folder)
                )
            yield
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(condition: Path, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition.exists():
        logs = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"{condition} never came\n{logs}"
        time.sleep(0.5)


def test_two_sites_learn_together_by_way_of_a_superlink(tmp_path: Path) -> None:
    home, tools = tmp_path / "home", Path(sys.executable).parent
    home.mkdir()
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{HOST}:{port}"\ninsecure = true\n',
        encoding="utf-8",
    )
    commands = {"superlink": [str(tools / "flower-superlink"), "--insecure", "--host", HOST, "--port", str(port)]}
    for name in ("north", "south"):
        own = ["--name", name, "--listen", str(tmp_path / f"{name}.sock"), "--run-dir", str(tmp_path / name)]
        commands[name] = [sys.executable, "-m", "freerun", *SITE, "--hidden-sizes", "8", "--quiet", *own]
        node_config = f'site-socket="{tmp_path / name}.sock"'
        node = ["--superlink", f"{HOST}:{port}", "--host", HOST, "--port", str(free_port())]
        commands[f"{name}-node"] = [str(tools / "flower-supernode"), "--insecure", *node, "--node-config", node_config]
    variables = environment(home)
    with started(commands, tmp_path, variables):
        wait_for(tmp_path / "north.sock", tmp_path)
        settings = f'rounds=2 updates-per-round=1 folder="{tmp_path / "server"}"'
        run = [str(tools / "flwr"), "run", str(ROOT / "examples" / "flower_app"), "here", "--run-config", settings]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (done := subprocess.run(run, env=variables, capture_output=True, text=True, cwd=tmp_path)).returncode:
            assert time.monotonic() < deadline, done.stdout + done.stderr  # until the SuperLink listens
            time.sleep(2)
        for name in ("north", "south"):
            wait_for(tmp_path / name / "summary.json", tmp_path)

    lines = (tmp_path / "server" / "federation.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = [json.loads(line) for line in lines]
    assert [sorted(figures["sites"]) for figures in rounds] == [["north", "south"]] * 2
    north, south = (freerun.load_policy(tmp_path / name).weights for name in ("north", "south"))
    np.testing.assert_array_equal(north, south)
