"""Starts a real `freerun watch` for tests, and sends it requests with exactly the given headers and parameters."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import preloaded_python


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.url).query)["token"][0]

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET", **query: Any) -> Answer:
        """Send a request, with the right token unless another is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        given = {"token": self.token, **query}
        words = urlencode({name: value for name, value in given.items() if value is not None})
        connection.request(method, f"{path}?{words}", headers=headers or {})
        answer = connection.getresponse()
        found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return found


@contextmanager
def watching(*paths: Path, **options: Any) -> Iterator[Server]:
    """Run `freerun watch` with these flags while the block runs."""
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = ["-m", "freerun", "watch", *map(str, paths), "--until-input-ends"]
    process = preloaded_python.Process(
        [*command, *([] if "port" in options else ["--port", "0"]), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Server(process.stdout.readline().strip(), process.pid)
    finally:
        process.communicate(timeout=20)


def write_run(path: Path, num_updates: int = 3, **config: Any) -> Path:
    """Write a run folder as a run leaves it after this number of updates."""
    path.mkdir(parents=True)
    settings = {"env": "CartPole-v1", "algo": "ppo", "mode": "freerun", "seed": 0, "num_workers": 2, **config}
    (path / "config.json").write_text(json.dumps(settings))
    add_updates(path, 0, num_updates)
    blocks = [[0, 0.0, 0, 1.5, 2, 0.5], [1, 0.0, 0, 2.0], [2, 0.0, 3, 2.0]]
    head = {"tracks": ["worker 0", "worker 1", "learner"], "states": [], "began": 1e9}
    moment = {"at": 2.0, "cpu_percent": 50.0, "worker_restarts": 1, "blocks": blocks}
    (path / "timeline.jsonl").write_text(json.dumps(head) + "\n" + json.dumps(moment) + "\n")
    incident = {"worker": 1, "time": 1e9, "kind": "died", "episode": 7, "seed": 99, "text": "Traceback: boom"}
    (path / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    (path / "log.txt").write_text("worker 1 is started again\n")
    return path


def add_updates(path: Path, first: int, number: int) -> None:
    """Append updates to metrics.jsonl."""
    with (path / "metrics.jsonl").open("a") as file:
        for update in range(first, first + number):
            record = {
                "step": 100 * (update + 1),
                "update": update + 1,
                "episodes": 2 * update,
                "return_mean": float(update),
                "wall_seconds": update + 1.0,
                "progress": 0.5,
                "steps_per_second": 100.0,
                "workers_busy_share": 0.5,
                "workers_waiting_for_slot_share": 0.5,
                "lag_share/0": 0.75,
                "lag_share/1": 0.25,
                "policy_loss": None,
            }
            file.write(json.dumps(record) + "\n")
