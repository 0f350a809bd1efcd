"""`--device auto`: makes a few updates on the CPU and on the GPU, and takes the faster one.

A GPU is not always faster. A gradient step of a small network takes a CPU less time than it takes to start the kernels
of that step on a GPU. On the CPU the learner has as many threads as in a run. Algorithms for which a GPU always is
faster (`gains_from_gpu`) are not tried.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from freerun.settings.config import AnyConfig
from freerun.settings.defaults import complete, num_learners
from freerun.settings.factories import is_tensors, make_factory
from freerun.settings.registry import find_algorithm
from freerun.tools.probe.measure import stand_in_for
from freerun.tools.probe.update_costs import time_updates

SECONDS = 1.0
"""How long each device is tried, after its first update."""
EPISODE_STEPS = 100
"""The length of the episodes of noise that are learned from. An update does not depend on it."""


def choose_device(config: AnyConfig) -> AnyConfig:
    """Return the settings with the faster device in place of `auto`.

    Tensors stay with the simulator's device, and several learners must agree: both keep `auto`, which is the GPU.
    """
    if config.device != "auto" or is_tensors(config) or num_learners(config) > 1:
        return config
    import torch

    if not torch.cuda.is_available():
        return config
    if gains_from_gpu(config):
        return dataclasses.replace(config, device="cuda")
    return faster_of(config, ("cpu", "cuda"))


def gains_from_gpu(config: AnyConfig) -> bool:
    """True if no trial is needed: the algorithm says so, and nothing keeps it from recording its gradient steps."""
    is_cpu_asked_for = getattr(config.algorithm, "learner", None) in ("fast", "numpy")
    traits = find_algorithm(config.algo).traits
    return traits.gains_from_gpu and config.algorithm.acceleration != "none" and not is_cpu_asked_for


def faster_of(config: AnyConfig, devices: Sequence[str]) -> AnyConfig:
    """Return the settings with the device on which an update takes the least time, and say so in one line."""
    if getattr(config.algorithm, "learner", None) in ("fast", "numpy"):
        return dataclasses.replace(config, device="cpu")
    tried = [complete(dataclasses.replace(config, device=device)) for device in devices]
    costs = time_updates(tried, stand_in_for(make_factory(config).spec, EPISODE_STEPS), SECONDS, has_threads=True)
    by_device = {device: cost.seconds for device, cost in zip(devices, costs, strict=True)}
    fastest = min(by_device, key=by_device.__getitem__)
    if not config.quiet:
        shown = ", ".join(f"{1000 * seconds:.3g} ms on {device}" for device, seconds in by_device.items())
        print(f"--device auto: an update takes {shown}; the learner uses {fastest}", file=sys.stderr, flush=True)
    return dataclasses.replace(config, device=fastest)
