"""What it costs to watch a run: noting states, the timeline, the page beside it; and what eight hours of one weigh.

Training is measured without any of it, with the timeline (which every run has), and with a page that a browser asks
once a second; interleaved, and compared by medians.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
from run_file import ResultFile, write_report

from freerun.core import Counts, State
from freerun.telemetry.machine_load import MachineLoad
from freerun.telemetry.timeline_recorder import EVERY_SECONDS, TimelineRecorder
from freerun.transport import processes
from freerun.transport.state_tracks import SharedTracks

WAYS = ("bare", "timeline", "page")
WORKLOADS: dict[str, dict[str, Any]] = {
    "CartPole-v1, 2 workers × 32": {
        "env": "CartPole-v1",
        "num_workers": 2,
        "envs_per_worker": 32,
        "segment_steps": 125,
    },
    "Straggler, 16 workers": {"env": "freerun/Straggler-v0", "num_workers": 16, "segment_steps": 25},
}
NUM_WORKERS = 100


@dataclass(frozen=True)
class Options:
    repeats: int = 5
    """Runs of each kind."""
    seconds: float = 15.0
    """About how long each takes."""
    hours: float = 8.0
    """Of the run that is made up, to see what the page holds."""
    output: Path = Path(__file__).parent / "results" / "watching"
    """Folder for watching.json and watching.md."""


# ---------------------------------------------------------------------------------------------- training


def note_microseconds() -> float:
    """Of a change of state; the lowest of several, for noise only adds."""
    tracks = SharedTracks(processes.context(), ["worker 0"])
    rates = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(5000):
            tracks.set_state(0, State.BUSY)
            tracks.set_state(0, State.WAITING_FOR_SLOT)
        rates.append((time.perf_counter() - started) / 10_000)
    return 1e6 * min(rates)


def timeline_percent_of_a_core() -> float:
    """For 100 workers that each change their state eight times a second; the lowest of several looks."""
    tracks = SharedTracks(processes.context(), [f"worker {worker}" for worker in range(NUM_WORKERS)])
    looks = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = TimelineRecorder(Path(folder) / "timeline.jsonl", tracks, Counts, MachineLoad(None))
        for number in range(30):
            for worker in range(NUM_WORKERS):
                for change in range(4):
                    moment = time.perf_counter() + 0.02 * (4 * number + change)
                    tracks.set_state(worker, State(change % 2), at=moment)
            started = time.thread_time()
            recorder.record()
            looks.append(time.thread_time() - started)
        recorder.close()
    return 100 * min(looks) / EVERY_SECONDS


TRAIN = """
import json, sys
from dataclasses import replace
from freerun import experiment
from freerun.core import NoTracks
from freerun.run import outputs, pool
from freerun.settings.registry import make_config
settings, way = json.loads(sys.argv[1]), sys.argv[2]
if way == "bare":
    class NoTimeline:
        def __init__(self, *parts): pass
        def close(self): pass
    made = pool.CollectorSettings
    pool.CollectorSettings = lambda *parts, **named: replace(made(*parts, **named), tracks=NoTracks())
    outputs.TimelineRecorder = NoTimeline
result = experiment.run(make_config({**settings, "watch": way == "page", "quiet": False, "display": "lines"}))
print("RATE", result.summary["steps_per_second"])
"""


def train(settings: dict[str, Any], way: str) -> float:
    """Steps per second, with a page that is asked all the while if the way says so."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", TRAIN, json.dumps({**settings, "run_dir": f"{folder}/run"}), way]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        url = None
        while way == "page" and url is None:
            line = process.stderr.readline()
            if not line:
                raise RuntimeError("the run ended before it had a page")
            url = line.removeprefix("Watch it at ").strip() if line.startswith("Watch it at ") else None
        while url is not None and process.poll() is None:
            look(url, "run")
            time.sleep(1.0)
        output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(errors)
        return float(output.rpartition("RATE")[2])


def look(url: str, run: str) -> float:
    """As the page does, once; the seconds that it took."""
    started = time.perf_counter()
    place, _, token = url.partition("?")
    for path in ("runs", "curves", "run", "timeline"):
        try:
            urllib.request.urlopen(f"{place}api/{path}?id={run}&cells=400&{token}", timeout=30).read()
        except OSError:  # the run has just ended
            break
    return time.perf_counter() - started


def rates(options: Options) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in WORKLOADS}
    for name, settings in WORKLOADS.items():
        steps_per_second = train({**settings, "total_steps": 20_000}, "timeline")
        for _ in range(options.repeats):
            for way in WAYS:
                total_steps = int(steps_per_second * options.seconds)
                found[name][way].append(train({**settings, "total_steps": total_steps}, way))
                print(name, way, f"{found[name][way][-1]:,.0f} steps/s", flush=True)
    return found


def seconds_to_see_a_killed_worker() -> float:
    """From the kill until the page is told, asked five times a second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "freerun", "train", "freerun/Straggler-v0", "--num-workers", "4", "--watch"]
        command += ["--segment-steps", "25", "--total-steps", "1000000", "--run-dir", f"{folder}/run"]
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            line = process.stderr.readline()
            while not line.startswith("Watch it at "):
                line = process.stderr.readline()
            place, _, token = line.removeprefix("Watch it at ").strip().partition("?")
            time.sleep(5.0)
            workers = [child for child in process.children(recursive=True) if "forkserver" in " ".join(child.cmdline())]
            max(workers, key=lambda child: child.create_time()).kill()
            killed = time.perf_counter()
            while True:
                with urllib.request.urlopen(f"{place}api/run?id=run&{token}", timeout=30) as answer:
                    told = json.load(answer)
                if told["num_incidents"]:
                    return time.perf_counter() - killed
                time.sleep(0.2)
        finally:
            process.terminate()
            process.communicate()


# ---------------------------------------------------------------------------------------------- a long run


def write_long_run(path: Path, hours: float) -> None:
    """As a run with a hundred workers would leave it: 100 blocks and an update a second."""
    path.mkdir(parents=True)
    config = {"env": "freerun/Straggler-v0", "algo": "ppo", "mode": "freerun", "seed": 0, "num_workers": NUM_WORKERS}
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    names = [*(f"worker {worker}" for worker in range(NUM_WORKERS)), "learner"]
    with (path / "timeline.jsonl").open("w") as file:
        file.write(json.dumps({"tracks": names, "states": [], "began": 0.0}) + "\n")
        for second in range(int(3600 * hours)):
            busy = rng.uniform(0.5, 1.0, len(names)).round(5).tolist()
            blocks = [[track, float(second), 0, share, 2, round(1 - share, 5)] for track, share in enumerate(busy)]
            line = {"at": second + 1.0, "cpu_percent": 95.0, "worker_restarts": second // 3600, "blocks": blocks}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    with (path / "metrics.jsonl").open("w") as file:
        for update in range(int(3600 * hours)):
            record = {f"metric_{number}": float(update + number) for number in range(30)}
            record |= {
                "step": 10_000.0 * update,
                "update": float(update),
                "wall_seconds": float(update),
                "lag_share/0": 1.0,
            }
            file.write(json.dumps(record) + "\n")
    with (path / "incidents.jsonl").open("w") as file:
        for number in range(1000):
            incident = {
                "worker": number % 100,
                "time": 0.0,
                "kind": "died",
                "episode": None,
                "seed": None,
                "text": "x" * 2000,
            }
            file.write(json.dumps(incident) + "\n")


@contextmanager
def watching(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "freerun", "watch", str(path), "--until-input-ends", "--port", "0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.communicate(timeout=20)


def long_run(hours: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long"
        write_long_run(path, hours)
        size = sum(each.stat().st_size for each in path.iterdir())
        with watching(path) as (url, process):
            place, _, token = url.partition("?")
            started, seconds = time.perf_counter(), -1.0
            while seconds < 3600 * hours:
                with urllib.request.urlopen(f"{place}api/timeline?id=long&cells=400&{token}", timeout=60) as answer:
                    seconds = json.load(answer)["seconds"]
            reading = time.perf_counter() - started
            looks = [look(url, "long") for _ in range(20)]
            found = {
                "folder_megabytes": size / 1e6,
                "seconds_until_all_is_read": reading,
                "look_milliseconds": 1e3 * statistics.median(looks),
                "server_megabytes": process.memory_info().rss / 1e6,
            }
            return found | in_browser(url)


def in_browser(url: str) -> dict[str, float]:
    """What the page itself takes after a minute, where there is a Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(url)
        page.wait_for_timeout(60_000)
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        heap = session.send("Runtime.getHeapUsage")["usedSize"]
        browser.close()
    return {"browser_heap_megabytes": heap / 1e6}


def main(options: Options) -> None:
    file = open_results(options.output)
    file.content["long_run"] = {"hours": options.hours, **long_run(options.hours)}
    print(file.content["long_run"], flush=True)
    file.content["note_microseconds"] = note_microseconds()
    file.content["timeline_percent_of_a_core"] = timeline_percent_of_a_core()
    file.content["killed_worker_seconds"] = seconds_to_see_a_killed_worker()
    file.content["rates"] = rates(options)
    file.save(*file.content)
    print(write_reports(options.output))


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "watching.json", {})


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "watching.md", markdown(file.content), file.stamped())


def markdown(found: dict[str, Any]) -> str:
    weights = found["long_run"]
    keeping = found.get("timeline_percent_of_a_core")  # results from before there were stamps do not have it
    lines = [
        "# What watching costs",
        "By `benchmarks/watching.py` (runs of each kind, interleaved; medians, and the lowest and highest).",
        "",
        "| | |",
        "| --- | ---: |",
        f"| to note a change of state | {found['note_microseconds']:.2f} µs |",
        *([f"| to keep the timeline of {NUM_WORKERS} workers | {keeping:.2f} % of a core |"] if keeping else []),
        f"| until a killed worker is seen on the page | {found['killed_worker_seconds']:.1f} s |",
        f"| {weights.get('hours', Options.hours):g} hours of {NUM_WORKERS} workers, on disk "
        f"| {weights['folder_megabytes']:.0f} MB |",
        f"| until a server has read them | {weights['seconds_until_all_is_read']:.0f} s |",
        f"| memory of that server | {weights['server_megabytes']:.0f} MB |",
        f"| its answer to all that the page asks for | {weights['look_milliseconds']:.0f} ms |",
    ]
    if "browser_heap_megabytes" in weights:
        lines.append(f"| memory of the page in the browser | {weights['browser_heap_megabytes']:.0f} MB |")
    lines += [
        "",
        "| steps/s | runs | without any of it | with the timeline | and a page that is looked at |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, ways in found["rates"].items():
        bare = statistics.median(ways["bare"])
        cells = [
            f"{middle:,.0f} ({middle / bare - 1:+.1%}; {min(some):,.0f}–{max(some):,.0f})"
            for some in ways.values()
            for middle in [statistics.median(some)]
        ]
        lines.append(f"| {name} | {len(ways['bare'])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
