"""The server of `freerun watch`: what it answers, and which requests it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from watch_server import Server, add_updates, watching, write_run

from freerun.core import UserError
from freerun.tools.watch.server import SCRIPTS, is_loopback, own_hosts, serve

APIS = ("/api/runs", "/api/run", "/api/curves", "/api/timeline")
PATHS = ("/", "/page.css", "/plotly.js", *(f"/{name}" for name in SCRIPTS), *APIS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one")
    write_run(folder / "series" / "000-first", seed=4)
    (folder / "secret.txt").write_text("nobody may read this")
    (folder.parent / "outside.txt").write_text("nor this")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{not json")
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    with watching(runs) as found:
        yield found


@pytest.mark.parametrize("path", PATHS)
def test_everything_answers_those_who_know_the_token(server: Server, path: str) -> None:
    answer = server.get(path, id="one")
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "server" not in answer.headers


@pytest.mark.parametrize("path", [*PATHS, "/nowhere"])
@pytest.mark.parametrize("token", ["wrong", "", None, "é"])
def test_a_wrong_token_gets_403(server: Server, path: str, token: str | None) -> None:
    answer = server.get(path, token=token)
    assert answer.status == 403
    assert server.token.encode() not in answer.body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""]
)
def test_a_foreign_host_is_refused(server: Server, host: str) -> None:
    """After DNS rebinding, a foreign name points to the address of this machine."""
    assert server.get("/", headers={"Host": host.format(port=server.port)}).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_this_machines_own_names_are_served(server: Server, host: str) -> None:
    assert server.get("/", headers={"Host": host.format(port=server.port)}).status == 200


def test_other_pages_may_not_ask(server: Server) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert server.get("/api/runs", headers=headers).status == 403
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Sec-Fetch-Site": "same-origin"}
    assert server.get("/api/runs", headers=own).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(server: Server, method: str) -> None:
    assert server.get("/api/run", method=method, id="one").status == 405


@pytest.mark.parametrize(
    "id",
    [
        "../outside.txt",
        "..",
        ".",
        "",
        "/etc",
        "secret.txt",
        "one/../one",
        "one/config.json",
        "%2e%2e",
        "broken",
        "series",
    ],
)
def test_no_path_is_a_run(server: Server, id: str) -> None:
    for path in ("/api/run", "/api/curves", "/api/timeline"):
        answer = server.get(path, id=id)
        assert answer.status == 404, answer.body


@pytest.mark.parametrize(
    "path",
    ["/secret.txt", "/../outside.txt", "/..%2foutside.txt", "/page/index.html", "/static/../server.py", "//etc/passwd"],
)
def test_no_file_can_be_read_by_its_path(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 404
    assert b"nobody" not in answer.body


def test_nonsense_numbers_are_told(server: Server) -> None:
    assert server.get("/api/timeline", id="one", start="x").status == 400
    assert server.get("/api/timeline", id="one", cells="1e9").status == 400
    for odd in ("nan", "inf", "-inf", "1e300"):
        assert server.get("/api/timeline", id="one", start=odd, stop=odd).status in (200, 400)
    assert len(server.get("/api/timeline", id="one", cells="100000000").json()["top"][0]) == 2000


def test_runs_are_listed_the_newest_first(server: Server) -> None:
    found = server.get("/api/runs").json()["runs"]
    assert [(run["id"], run["seed"]) for run in found] == [("series/000-first", 4), ("one", 0)]
    assert found[0]["outcome"] == "running"


def test_runs_that_differ_only_in_their_seed_are_one_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a0", learning_rate=0.1, quiet=True)
    write_run(tmp_path / "a1", learning_rate=0.1, quiet=False, seed=1)
    write_run(tmp_path / "b0", learning_rate=0.2)
    write_run(tmp_path / "c0", learning_rate=0.2, mode="sync")
    with watching(tmp_path) as server:
        runs = {run["id"]: run for run in server.get("/api/runs").json()["runs"]}
    assert runs["a0"]["group"] == runs["a1"]["group"]
    assert len({run["group"] for run in runs.values()}) == 3
    assert runs["a0"]["settings"] == runs["a1"]["settings"] == ["learning_rate=0.1"]
    assert runs["b0"]["settings"] == ["learning_rate=0.2"]
    assert runs["c0"]["settings"] == [], "its mode tells it from the others already"
    assert runs["a0"]["began"] == pytest.approx((tmp_path / "a0" / "config.json").stat().st_mtime)


def test_the_order_stays_while_runs_go_on(tmp_path: Path) -> None:
    for name, began in (("old", 1000), ("new", 2000)):
        os.utime(write_run(tmp_path / name) / "config.json", (began, began))
    add_updates(tmp_path / "old", 3, 1)
    with watching(tmp_path) as server:
        assert [run["id"] for run in server.get("/api/runs").json()["runs"]] == ["new", "old"]


def test_a_run_is_told(server: Server) -> None:
    run = server.get("/api/run", id="one").json()
    assert run["updates"] == 3
    assert run["lags"] == [[0, 225.0], [1, 75.0]]
    assert run["advice"].startswith("workers wait 50% for slots: learning takes 2.0 × as long as collecting would")
    assert {figure["name"]: figure["value"] for figure in run["figures"]}["cpu_percent"] == 50.0
    assert run["incidents"][0]["text"] == "Traceback: boom"
    assert run["log"] == "worker 1 is started again\n"
    assert run["config"]["env"] == "CartPole-v1"


def test_a_timeline_is_told_by_what_each_did_most(server: Server) -> None:
    found = server.get("/api/timeline", id="one", cells=2).json()
    assert found["tracks"] == ["worker 0", "worker 1", "learner"]
    assert found["top"] == [[0, 0], [0, 0], [3, 3]]
    assert found["percent"] == [[75, 75], [100, 100], [100, 100]]
    part = server.get("/api/timeline", id="one", cells=1, start=0.5, stop=1.5).json()
    assert (part["start"], part["stop"]) == (0.5, 1.5)


def test_curves_follow_a_run_that_goes_on(tmp_path: Path) -> None:
    path = write_run(tmp_path / "live")
    with watching(path) as server:
        first = server.get("/api/curves", id="live").json()
        assert first["columns"]["return_mean"] == [0.0, 1.0, 2.0]
        assert server.get("/api/curves", id="live", have=3).json() == {"num_updates": 3}
        add_updates(path, 3, 1)
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 500, "half')
        second = server.get("/api/curves", id="live", have=3).json()
        assert second["num_updates"] == 4
        assert second["columns"]["return_mean"] == [0.0, 1.0, 2.0, 3.0]
        (path / "summary.json").write_text(json.dumps({"outcome": "finished", "ledger": {"trained": 8}}))
        run = server.get("/api/run", id="live").json()
        assert (run["outcome"], run["ledger"]) == ("finished", {"trained": 8})


def test_another_run_in_the_same_folder_starts_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with watching(path) as server:
        assert server.get("/api/curves", id="run").json()["num_updates"] == 3
        shutil.rmtree(path)
        write_run(path, num_updates=1)
        os.utime(path / "config.json", (1, 1))
        assert server.get("/api/curves", id="run").json()["num_updates"] == 1


def test_it_ends_with_its_starter(tmp_path: Path) -> None:
    with watching(tmp_path) as server:
        assert server.get("/api/runs").json()["runs"] == []
    assert not psutil.pid_exists(server.pid)


def test_its_token_and_port_can_be_chosen(tmp_path: Path) -> None:
    with watching(tmp_path, token="a&b<c>d", port=0) as server:
        assert server.token == "a&b<c>d"
        page = server.get("/").body.decode()
        assert "page.js?token=a%26b%3Cc%3Ed" in page


def test_other_machines_need_a_token_that_was_chosen(tmp_path: Path) -> None:
    for token in (None, "short"):
        with pytest.raises(UserError, match="--token of 16 characters"):
            serve([tmp_path], host="0.0.0.0", token=token)


def test_a_port_that_is_taken_is_told(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose another --host or --port"):
        serve([tmp_path], port=server.port)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "freerun", "watch", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


def test_names_of_this_machine() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    assert own_hosts("example.org", 80) == {"example.org:80"}
    assert "[::1]:8642" in own_hosts("::1", 8642)
    assert "127.0.0.1:1" in own_hosts("0.0.0.0", 1)


def test_a_run_of_a_sweep_comes_with_all_trials(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep" / "trial-000")
    trials = {"env": "CartPole-v1", "vary": ["gamma"], "trials": [{"number": 0, "state": "running", "score": None}]}
    (tmp_path / "sweep" / "trials.json").write_text(json.dumps(trials))
    with watching(tmp_path) as found:
        assert json.loads(found.get("/api/run", id="sweep/trial-000").body)["sweep"] == trials
    # The folder around a run that was named itself is none of the page's business.
    with watching(tmp_path / "sweep" / "trial-000") as found:
        assert json.loads(found.get("/api/run", id="trial-000").body)["sweep"] is None
    (tmp_path / "sweep" / "trials.json").write_text('{"trials": 3}')
    with watching(tmp_path) as found:
        assert json.loads(found.get("/api/run", id="sweep/trial-000").body)["sweep"] is None
