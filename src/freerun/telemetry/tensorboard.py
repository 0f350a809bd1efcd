"""TensorBoard: `tensorboard --logdir runs` shows every run of the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from freerun.core import RequiredPackage, TrackerTraits
from freerun.telemetry.metric_tags import finite_tags
from freerun.telemetry.tracking import TrackedRun


class TensorBoard:
    """A sink that writes TensorBoard's event files into the run folder."""

    traits = TrackerTraits(
        description="event files in the run folder",
        package=RequiredPackage("tensorboard", "TensorBoard", "tensorboard"),
    )

    def __init__(self, run: TrackedRun):
        # Here and not above: `freerun list` reads the traits, and torch takes seconds to import.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.path))
        self._writer.add_text("config", f"```\n{json.dumps(run.config, indent=2)}\n```")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for tag, value in finite_tags(metrics).items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()
