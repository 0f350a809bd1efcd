"""How soon does a run recover when its workers are killed and stopped, and is anything lost?

`tests/chaos.py` sends the signals and checks the run. This script keeps what it found for each mode; the results of
modes that are not run stay.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import chaos
from run_file import ResultFile, write_report


@dataclass(frozen=True)
class Options:
    modes: tuple[str, ...] = chaos.MODES
    """Modes to run."""
    faults: int = 200
    """Signals sent to workers, in each mode."""
    storms: tuple[str, ...] = tuple(chaos.STORMS)
    """Kinds of storms."""
    seed: int = 0
    """Decides which storms come."""
    output: Path = Path(__file__).parent / "results" / "chaos"
    """Folder for chaos.json and chaos.md."""


def markdown(found: dict[str, Any]) -> str:
    reports = [
        chaos.Report(**{**report, "storms": [chaos.Storm(**storm) for storm in report["storms"]]})
        for report in found.values()
    ]
    lines = [
        "# Workers that are killed and stopped",
        "",
        f"`benchmarks/chaos_storms.py`, one run of each mode, {chaos.NUM_WORKERS} workers. The speed must be back at "
        f"{100 * chaos.RECOVERED_SHARE:g} % within {chaos.RECOVERY_SECONDS:g} s of a kill, and "
        f"{chaos.RECOVERY_SECONDS + chaos.STEP_TIMEOUT:g} s of a stop. A complaint is a recovery that took longer, or "
        "anything lost or left behind.",
        "",
        chaos.table(reports),
    ]
    lines += [f"- `{report.mode}`: {complaint}" for report in reports for complaint in markdown_complaints(report)]
    return "\n".join(lines)


def markdown_complaints(report: chaos.Report) -> list[str]:
    """The complaints of a mode; those about recoveries after storms of one kind are one line."""
    late: dict[tuple[str, str], list[float]] = {}
    others = []
    for complaint in report.complaints:
        # NAME OF THE STORM (SIGNALS): back to 95% after SECONDS s (limit LIMIT)
        storm, _, rest = complaint.partition(" (")
        seconds, is_late, limit = rest.rpartition(" after ")[2].partition(" s (limit ")
        if is_late:
            late.setdefault((storm, limit.rstrip(")")), []).append(float(seconds))
        else:
            others.append(complaint)
    return [
        *(
            f"{len(seconds)} × too late after “{storm}”, {min(seconds):g} to {max(seconds):g} s instead of {limit} s"
            for (storm, limit), seconds in late.items()
        ),
        *others,
    ]


def write_reports(folder: Path) -> str:
    file = ResultFile(folder / "chaos.json", {})
    return write_report(folder / "chaos.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = ResultFile(options.output / "chaos.json", {})
    say = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for mode in options.modes:
            report = chaos.torment(mode, options.faults, options.seed, Path(folder) / mode, say, options.storms)
            file.content[mode] = asdict(report)
            file.save(mode)
    print(write_reports(options.output))
    if num_complaints := sum(len(file.content[mode]["complaints"]) for mode in options.modes):
        raise SystemExit(f"{num_complaints} complaints, see {options.output / 'chaos.md'}")


if __name__ == "__main__":
    main()
