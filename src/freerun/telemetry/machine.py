"""How busy the machine is: all of its cores, and the GPU that the learner uses."""

from __future__ import annotations

import psutil

from freerun.core import Metrics


class Machine:
    """Percentages since the last look. NVML is asked where a GPU is used and its Python package is there."""

    def __init__(self, gpu: int | None):
        self._gpu = None if gpu is None else _nvml_handle(gpu)
        self._metrics: Metrics = {}
        psutil.cpu_percent(None)  # the first call has nothing to compare with

    def look(self) -> Metrics:
        """Costs 0.1 ms, and says little about a moment shorter than a second."""
        metrics = {"cpu_percent": psutil.cpu_percent(None)}
        if self._gpu is not None:
            import pynvml

            metrics["gpu_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
        self._metrics = metrics
        return metrics

    def read(self, step: int) -> Metrics:
        """What the last look saw."""
        return self._metrics

    def close(self) -> None:
        """Nothing is held."""


def _nvml_handle(gpu: int) -> object | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(gpu)  # type: ignore[no-any-return]
    except ModuleNotFoundError:
        return None
    except pynvml.NVMLError:  # a driver without it
        return None
