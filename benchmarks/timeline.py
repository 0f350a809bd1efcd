"""Who waits for whom: `sync` and `freerun` on Straggler, the same demand, drawn side by side from what was measured."""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from pictures import is_drawn, mark_as_drawn
from run_file import ResultFile, write_report

from freerun.persistence.files import read_json
from freerun.telemetry.timeline import STATE_NAMES, RecordedTimeline
from freerun.tools.plots.drawing import draw
from freerun.tools.plots.panels import Panel, PlotRows
from freerun.tools.plots.timeline_panels import timelines

MODES = ("sync", "freerun")


@dataclass(frozen=True)
class Options:
    num_workers: int = 16
    """Workers, and environments."""
    total_episodes: int = 320
    """Of each run."""
    output: Path = Path(__file__).parent / "results" / "timeline"
    """Folder for timeline.json, timeline.png and timeline.md."""


def train(mode: str, run_dir: Path, options: Options) -> None:
    command = [sys.executable, "-m", "freerun", "train", "freerun/Straggler-v0", "--mode", mode, "--quiet"]
    command += ["--num-workers", str(options.num_workers), "--episodes-per-update", str(2 * options.num_workers)]
    command += ["--total-episodes", str(options.total_episodes), "--run-dir", str(run_dir)]
    subprocess.run(command, check=True)


def shares_of(run_dirs: list[Path]) -> dict[str, Any]:
    """The speed of each run, and the share of the workers' time in each state."""
    found = {}
    for path in run_dirs:
        recording, summary = RecordedTimeline.of(path), read_json(path / "summary.json")
        assert recording is not None
        grid = recording.grid()
        spent = grid.cells(0.0, grid.seconds, 1)[: summary["num_workers"]].sum(axis=(0, 1))
        shares = [float(share) for share in spent / spent.sum()]
        found[summary["mode"]] = {"steps_per_second": summary["steps_per_second"], "shares": shares}
    return found


def packed(panel: Panel) -> dict[str, Any]:
    """What a panel shows, as JSON. The timelines themselves are too large to be kept."""
    assert panel.rows is not None
    pixels = np.ascontiguousarray(panel.rows.pixels)
    return {
        "title": panel.title,
        "names": panel.rows.names,
        "seconds": panel.rows.seconds,
        "shape": pixels.shape,
        "pixels": base64.b64encode(zlib.compress(pixels.tobytes())).decode(),
    }


def unpacked(found: dict[str, Any]) -> Panel:
    pixels = np.frombuffer(zlib.decompress(base64.b64decode(found["pixels"])), np.uint8).reshape(found["shape"])
    return Panel(found["title"], "seconds", "", rows=PlotRows(found["names"], pixels, found["seconds"]))


def table(content: dict[str, Any]) -> str:
    lines = [
        "# Who waits for whom",
        f"{content['num_workers']} workers, 10 ms a step on average, up to 50; the workers' time. By "
        "`benchmarks/timeline.py`.",
        "",
        "| mode | steps/s | " + " | ".join(STATE_NAMES) + " |",
        "| --- | ---: |" + " ---: |" * len(STATE_NAMES),
    ]
    for mode, found in content["modes"].items():
        shares = " | ".join(f"{share:.0%}" for share in found["shares"])
        lines.append(f"| `{mode}` | {found['steps_per_second']:,.0f} | {shares} |")
    return "\n".join([*lines, "", "![](timeline.png)"])


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "timeline.json", {}, lambda content: content["modes"])


def write_reports(folder: Path) -> str:
    file, picture = open_results(folder), folder / "timeline.png"
    if not is_drawn(picture):
        draw([unpacked(found["picture"]) for found in file.content["modes"].values()], picture)
        mark_as_drawn(picture)
    return write_report(folder / "timeline.md", table(file.content), file.stamped())


def main(options: Options) -> None:
    file = open_results(options.output)
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = [Path(folder) / mode for mode in MODES]
        for mode, run_dir in zip(MODES, run_dirs, strict=True):
            train(mode, run_dir, options)
        file.content = {"num_workers": options.num_workers, "modes": shares_of(run_dirs)}
        for mode, panel in zip(MODES, timelines(run_dirs), strict=True):
            file.content["modes"][mode]["picture"] = packed(panel)
    file.save(*MODES)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
