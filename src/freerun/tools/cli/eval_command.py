"""`freerun eval`."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from freerun.settings.flag_parsing import parse
from freerun.tools.cli import RunDir, Trusted, simulator_start

if TYPE_CHECKING:
    from freerun.run.evaluation import Evaluation


@dataclass(frozen=True)
class _EvalFlags:
    run_dir: RunDir
    """The folder of a run, or of one of its checkpoints."""
    checkpoint: str | None = None
    """Which checkpoint of a run folder: best, newest, or a name (if not given: the policy that the run ended with)."""
    episodes: int = 10
    """The number of episodes."""
    render: Path | None = None
    """Film each episode into this folder: as mp4 if ffmpeg is on the PATH or imageio-ffmpeg installed, else as GIF."""
    view: str | None = None
    """How --render shows the episodes, where an environment can be seen in several ways (freerun/RoughDrone: above,
    3d)."""
    seed: int | None = None
    """The seed of the episodes (the run's own if not given). They are never those of training or of --eval-every."""
    compare: bool = False
    """Also play the environment's baseline policies. For cyber defence, they sleep, act at random, or restore on
    sight."""
    sample: bool = False
    """Sample actions as in training, instead of taking the most likely ones."""
    trust: Trusted = ()


def evaluate(words: list[str]) -> int:
    """Run a trained policy on fresh episodes."""
    options = parse(_EvalFlags, words, prog="freerun eval", description=evaluate.__doc__)
    # Isaac Sim must be started before torch is imported, which making a policy does.
    simulator_start.start_for(options.run_dir)
    from freerun.run import evaluation

    if options.compare:
        _print_comparison(
            evaluation.compare(options.run_dir, options.episodes, options.seed, options.checkpoint, options.trust)
        )
        return 0
    result = evaluation.evaluate(
        options.run_dir,
        options.episodes,
        options.seed,
        not options.sample,
        options.render,
        options.checkpoint,
        options.trust,
        options.view,
    )
    print(result)
    for path in result.pictures:
        print(path)
    if any(path.suffix == ".gif" for path in result.pictures):
        from freerun.run.filming import GIF_ADVICE

        print(GIF_ADVICE, file=sys.stderr)
    return 0


def _print_comparison(evaluations: dict[str, Evaluation]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("policy")
    table.add_column("mean return", justify="right")
    table.add_column("deviation", justify="right")
    for name, found in sorted(evaluations.items(), key=lambda item: -statistics.mean(item[1].returns)):
        deviation = statistics.stdev(found.returns) if len(found.returns) > 1 else 0.0
        style = "bold green" if name == "trained" else None
        table.add_row(name, f"{statistics.mean(found.returns):.1f}", f"{deviation:.1f}", style=style)
    Console().print(table)
