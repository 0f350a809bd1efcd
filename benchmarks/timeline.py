"""Who waits for whom: `sync` and `freerun` on Straggler, the same demand, drawn side by side from what was measured."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from run_file import ResultFile, write_report

from freerun.persistence.files import read_json
from freerun.telemetry.timeline import STATE_NAMES, RecordedTimeline
from freerun.tools.cli.main import main as freerun

MODES = ("sync", "freerun")


@dataclass(frozen=True)
class Options:
    num_workers: int = 16
    """Workers, and environments."""
    total_episodes: int = 320
    """Of each run."""
    output: Path = Path(__file__).parent / "results" / "timeline"
    """Folder for timeline.png and timeline.md."""


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
    """Write the page; the picture needs the whole timelines, which are too large to be kept."""
    file = open_results(folder)
    return write_report(folder / "timeline.md", table(file.content), file.stamped())


def main(options: Options) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    file = open_results(options.output)
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = [Path(folder) / mode for mode in MODES]
        for mode, run_dir in zip(MODES, run_dirs, strict=True):
            train(mode, run_dir, options)
        file.content = {"num_workers": options.num_workers, "modes": shares_of(run_dirs)}
        words = ["plot", *map(str, run_dirs), "--what", "timeline", "-o", str(options.output / "timeline.png")]
        assert freerun(words) == 0
    file.save(*MODES)
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
