"""Who waits for whom: `sync` and `freerun` on Straggler, the same demand, drawn side by side from what was measured."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

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


def table(run_dirs: list[Path]) -> str:
    lines = ["| mode | steps/s | " + " | ".join(STATE_NAMES) + " |", "| --- | ---: |" + " ---: |" * len(STATE_NAMES)]
    for path in run_dirs:
        recording, summary = RecordedTimeline.of(path), read_json(path / "summary.json")
        assert recording is not None
        grid = recording.grid()
        spent = grid.cells(0.0, grid.seconds, 1)[: summary["num_workers"]].sum(axis=(0, 1))
        shares = " | ".join(f"{share:.0%}" for share in spent / spent.sum())
        lines.append(f"| `{summary['mode']}` | {summary['steps_per_second']:,.0f} | {shares} |")
    return "\n".join(lines)


def main(options: Options) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = [Path(folder) / mode for mode in MODES]
        for mode, run_dir in zip(MODES, run_dirs, strict=True):
            train(mode, run_dir, options)
        found = table(run_dirs)
        words = ["plot", *map(str, run_dirs), "--what", "timeline", "-o", str(options.output / "timeline.png")]
        assert freerun(words) == 0
    print(found)
    about = f"{options.num_workers} workers, 10 ms a step on average, up to 50; the workers' time."
    about += " By `benchmarks/timeline.py`."
    (options.output / "timeline.md").write_text(f"# Who waits for whom\n{about}\n\n{found}\n\n![](timeline.png)\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
