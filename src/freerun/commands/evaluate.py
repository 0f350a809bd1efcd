"""`freerun eval`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from freerun.commands import RunDir, Trusted, simulator
from freerun.parsing import parse


@dataclass(frozen=True)
class _Eval:
    run_dir: RunDir
    """Folder of a run, or of one of its checkpoints."""
    checkpoint: str | None = None
    """Of a run folder: best, newest, or the name of one (if not given: the policy that the run ended with)."""
    episodes: int = 10
    """How many episodes."""
    render: Path | None = None
    """Film each episode as a GIF in this folder."""
    seed: int | None = None
    """Seed of the episodes (derived from the run's seed if not given)."""
    compare: bool = False
    """For cyber defence: beside defenders that sleep, act at random, or restore on sight."""
    sample: bool = False
    """Sample actions as in training, instead of taking the most likely ones."""
    trust: Trusted = ()


def evaluate(words: list[str]) -> int:
    """Run a trained policy on fresh episodes."""
    options = parse(_Eval, words, prog="freerun eval", description=evaluate.__doc__)
    simulator.start_for(options.run_dir)
    from freerun import evaluation

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
    )
    print(result)
    for path in result.pictures:
        print(path)
    return 0


def _print_comparison(evaluations: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("defender")
    table.add_column("mean return", justify="right")
    table.add_column("deviation", justify="right")
    for name, found in sorted(evaluations.items(), key=lambda item: -statistics.mean(item[1].returns)):
        deviation = statistics.stdev(found.returns) if len(found.returns) > 1 else 0.0
        style = "bold green" if name == "trained" else None
        table.add_row(name, f"{statistics.mean(found.returns):.1f}", f"{deviation:.1f}", style=style)
    Console().print(table)
