"""TensorBoard: `tensorboard --logdir runs` shows every run of the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from freerun.core import UserError
from freerun.telemetry.tags import finite_tags
from freerun.telemetry.tracking import TrackedRun

try:
    import tensorboard  # noqa: F401 - torch's own message says less
except ModuleNotFoundError:
    raise UserError("--track tensorboard needs TensorBoard: pip install 'freerun[tensorboard]'") from None


class TensorBoard:
    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.path))
        self._writer.add_text("config", f"```\n{json.dumps(run.config, indent=2)}\n```")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for tag, value in finite_tags(metrics).items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()
