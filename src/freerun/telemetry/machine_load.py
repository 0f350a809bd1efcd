"""Measures how busy the machine is: all of its cores, and the GPU that the learner uses."""

from __future__ import annotations

import psutil

from freerun.core import Metrics


class MachineLoad:
    """The load since the last measurement, in percent. A GPU is measured if its Python package (NVML) is installed."""

    def __init__(self, gpu: int | None):
        self._gpu = None if gpu is None else _nvml_handle(gpu)
        self._metrics: Metrics = {}
        psutil.cpu_percent(None)  # the first call has nothing to compare with

    def measure(self) -> Metrics:
        """Return the load since the last call. A call costs 0.1 ms, and intervals under a second say little."""
        metrics = {"cpu_percent": psutil.cpu_percent(None)}
        if self._gpu is not None:
            import pynvml  # an optional package, which is there if a handle is

            metrics["gpu_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
        # Replaced as a whole: the learner reads it while the timeline's thread measures, without a lock.
        self._metrics = metrics
        return metrics

    def read(self, step: int) -> Metrics:
        """Return the result of the last measurement."""
        return self._metrics

    def close(self) -> None:
        """This gauge holds nothing open."""


def _nvml_handle(gpu: int) -> object | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(gpu)  # type: ignore[no-any-return]
    except ModuleNotFoundError:  # an optional package: without it the metric is left out
        return None
    except pynvml.NVMLError:  # the driver has no NVML
        return None
