"""`freerun export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freerun.settings.flag_parsing import parse
from freerun.tools.cli import RunDir, Trusted


@dataclass(frozen=True)
class _ExportFlags:
    run_dir: RunDir
    """The folder of a run, or of one of its checkpoints."""
    to: Literal["onnx", "torchscript", "numpy"] = "onnx"
    """The kind of file: for onnxruntime, for torch.jit.load, or for freerun.load_policy without torch."""
    output: Path | None = None
    """The file to write (if not given: RUN_DIR/export/policy with the ending of its kind). The contract is written
    beside it."""
    frequency: float | None = None
    """The rate in Hz at which actions are to be taken, for the contract (if not given: what the environment's metadata
    say)."""
    checkpoint: str | None = None
    """Which checkpoint of a run folder: best, newest, or a name (if not given: the policy that the run ended with)."""
    observations: int = 1000
    """The number of observations on which the file is compared with the trained policy."""
    trust: Trusted = ()


def export(words: list[str]) -> int:
    """Write a trained policy to a file for a robot or another program, and check the file."""
    options = parse(_ExportFlags, words, prog="freerun export", description=export.__doc__)
    from freerun.run.export import export as export_run
    from freerun.run.parity import TOLERANCE

    found = export_run(
        options.run_dir,
        options.to,
        options.output,
        options.frequency,
        options.checkpoint,
        options.observations,
        options.trust,
    )
    print(found)
    if not found.parity.holds:
        print(f"The file differs from the trained policy by more than {TOLERANCE:g}: do not use it.")
    return 0 if found.parity.holds else 1
