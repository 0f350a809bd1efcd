"""Runs the command `freerun bench` on tiny environments."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import bench_results
import preloaded_python
import pytest

from freerun.core import UserError
from freerun.tools.bench import load_meter
from freerun.tools.bench.bench_options import BenchOptions
from freerun.tools.bench.bench_run import bench, write_reports
from freerun.tools.bench.results import Results, check_changes
from freerun.tools.cli.main import main

TESTS = Path(__file__).parents[2]
TOY = ["toy_envs:Audit", "--env-args", "step_seconds", "0.001", "short", "20", "long", "40"]
SMALL = ["--seconds", "0.5", "--workers", "2", "--max-minutes", "3"]


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


class _Links(HTMLParser):
    """Collects the addresses that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def num_runs(folder: Path) -> dict[str, int]:
    return {f"{case['label']} × {case['num_workers']}": len(case["runs"]) for case in read(folder)["cases"]}


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded_bench_jobs")
def test_two_modes_are_compared_and_the_bench_goes_on_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bench"
    words = ["bench", *TOY, *SMALL, "--modes", "sequential,freerun", "--repeats", "1", "--output", str(folder)]
    assert main(words) == 0
    told = capsys.readouterr().out
    for word in (
        "steps/s",
        "episodes/s",
        "of bare",
        "start-up s",
        "memory MB",
        "CPU",
        "100k episodes",
        "The machine was",
    ):
        assert word in told
    assert num_runs(folder) == {"bare × 1": 1, "bare × 2": 1, "sequential × 1": 1, "freerun × 2": 1}
    (table,) = read(folder)["tables"]
    assert {row["label"] for row in table["rows"]} == {"sequential", "freerun"}
    for row in table["rows"]:
        assert 0 < row["steps"]["middle"] < 2 * 1000  # a step takes a millisecond
        assert row["memory_megabytes"] > 10
        assert 0 < row["workers_busy"] <= 1
    assert "| mode | steps/s |" in (folder / "report.md").read_text()
    _check_page(folder / "report.html", num_pictures=2)

    assert main(["bench", "--resume", str(folder), "--repeats", "2", "--modes", "sequential,pipes"]) == 0
    assert num_runs(folder)["sequential × 1"] == 2
    assert num_runs(folder)["pipes × 2"] == 2
    assert main(["bench", *TOY, *SMALL, "--output", str(folder)]) == 2
    assert "holds a bench already" in capsys.readouterr().err
    assert main(["bench", "--resume", str(folder), "--seconds", "1"]) == 2
    assert "was measured with --seconds 0.5" in capsys.readouterr().err


def _check_page(path: Path, num_pictures: int) -> None:
    """Check that the page is complete, loads nothing from elsewhere and runs no script."""
    text = path.read_text()
    page = _Links()
    page.feed(text)
    assert page.tags.count("img") == num_pictures
    assert "script" not in page.tags
    assert all(link.startswith("data:") for link in page.asked)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert text.rstrip().endswith("</html>")


@pytest.mark.slow
def test_an_interrupted_bench_keeps_what_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    words = [*TOY, *SMALL, "--modes", "sequential,freerun", "--repeats", "100", "--output", str(folder)]
    process = preloaded_python.Process(
        ["-m", "freerun", "bench", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for _ in range(600):
        if (folder / "report.json").exists() and num_runs(folder)["sequential × 1"]:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"freerun bench --resume {folder}" in out
    assert read(folder)["outcome"] == "interrupted"
    assert num_runs(folder)["sequential × 1"] >= 1
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["NoSuch-v0"], "there is no environment 'NoSuch-v0'"),
        (["CartPole-v1", "--modes", "pips"], "did you mean pipes?"),
        (["CartPole-v1", "--modes", "freerun:segment_steps"], "written as freerun:name=value"),
        (["CartPole-v1", "--modes", "pipes:segment_steps=25"], "it belongs to --mode freerun"),
        (["CartPole-v1", "--modes", "freerun:segment=25"], "did you mean segment_steps?"),
        (
            ["CartPole-v1", "--modes", "freerun:segment_steps=x"],
            "is of the wrong kind: it takes int | None",
        ),
        (["CartPole-v1", "--workers", "ten"], "--workers are numbers"),
        (["CartPole-v1", "--workers", "0"], "--workers are numbers"),
        (["CartPole-v1", "--seconds", "0"], "--seconds must lie between"),
        (["CartPole-v1", "--repeats", "0"], "--repeats must be at least 1"),
        (["CartPole-v1", "--max-minutes", "-1"], "--max-minutes must be more than 0"),
        (["--resume", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("freerun: ")
    assert error.count("\n") == 1
    assert told in error
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text('{"options": {}}')
    assert main(["bench", "--resume", str(tmp_path)]) == 2
    assert "is not a report of freerun bench" in capsys.readouterr().err


@pytest.mark.usefixtures("preloaded_bench_jobs")
def test_a_bench_from_elsewhere_runs_no_code_that_is_not_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even the module of a mode is imported, which the report names as module:Class:setting=value."""
    imported, built = tmp_path / "imported", tmp_path / "built"
    (tmp_path / "sneaky.py").write_text(f"open({str(imported)!r}, 'w').close()\nfrom own_mode import InThisProcess\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(TESTS.parent / "examples"))
    folder = tmp_path / "bench"
    folder.mkdir()
    options = BenchOptions("toy_envs:leave_a_mark", workers="1", seconds=0.1, env_args={"command": str(built)})
    Results(options, load_meter.describe(), []).write(folder)
    report = read(folder)
    report["options"]["modes"] = "freerun:segment_steps=25,sneaky:InThisProcess:num_workers=2"
    (folder / "report.json").write_text(json.dumps(report))
    assert main(["bench", "--resume", str(folder), "--trust", "toy_envs:Other"]) == 2
    error = capsys.readouterr().err
    assert "names code to run: sneaky:InThisProcess, toy_envs:leave_a_mark. If you know it and trust it" in error
    assert "--trust sneaky:InThisProcess --trust toy_envs:leave_a_mark" in error
    assert not imported.exists()
    assert not built.exists()
    trusted = ["--trust", "sneaky:InThisProcess", "--trust", "toy_envs:leave_a_mark"]
    main(["bench", "--resume", str(folder), *trusted, "--repeats", "1"])
    assert "names code" not in capsys.readouterr().err
    assert imported.exists()


def test_secrets_of_an_environment_stand_in_no_report(tmp_path: Path) -> None:
    found = bench_results.results(
        bench_results.case("pipes", 10, 900.0, 910.0), env_args={"api_key": "swordfish-1234", "size": 7}
    )
    write_reports(found, tmp_path)
    for name in ("report.json", "report.md", "report.html"):
        assert "swordfish-1234" not in (tmp_path / name).read_text()
    resumed = Results.read(tmp_path)
    with pytest.raises(UserError, match="--env-args api_key is a secret"):
        bench(resumed.options, print, resumed)
    check_changes(resumed.options, found.options)  # given again, it is taken for the same
