"""What the runners share: their command line, their timing, and the line that they print.

All systems collect with a stochastic 64-64 tanh policy acting on the processor, and do not train. That favours the
peers: freerun's own runner trains at the same time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace

from workloads import WORKLOADS, Workload

WARM_UP_SECONDS = 2.0
CANNOT_RUN = 3

Advance = Callable[[], tuple[int, int]]
"""Collects some more; returns the numbers of steps and of ended episodes."""
Collecting = Callable[[Workload], AbstractContextManager[Advance]]
"""Starts a system, and stops it at the end."""


class CannotRun(Exception):
    """The system has no way to do this workload, told in one sentence."""


@dataclass(frozen=True)
class Figures:
    steps_per_second: float
    episodes_per_second: float
    startup_seconds: float
    """From the end of the imports to the end of the first `Advance`."""


def parser(description: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--workload", choices=WORKLOADS, required=True)
    arguments.add_argument(
        "--hand-over", type=int, default=32, help="steps of each environment that are collected at once"
    )
    arguments.add_argument("--seconds", type=float, default=10.0, help="how long to measure, after the warm-up")
    return arguments


def run(collecting: Collecting, description: str | None) -> None:
    """A runner's main function."""
    arguments = parser(description).parse_args()
    started = time.perf_counter()
    try:
        with collecting(replace(WORKLOADS[arguments.workload], hand_over=arguments.hand_over)) as advance:
            advance()
            figures = measure(advance, arguments.seconds, time.perf_counter() - started)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        raise SystemExit(CANNOT_RUN) from None
    report(figures)


def measure(advance: Advance, seconds: float, startup_seconds: float) -> Figures:
    """Warm up, then time whole calls until the seconds are over."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        advance()
    started = time.perf_counter()
    num_steps = num_episodes = 0
    elapsed = 0.0
    while elapsed < seconds:
        more_steps, more_episodes = advance()
        num_steps += more_steps
        num_episodes += more_episodes
        elapsed = time.perf_counter() - started
    return Figures(num_steps / elapsed, num_episodes / elapsed, startup_seconds)


def report(figures: Figures) -> None:
    print(json.dumps(asdict(figures)), flush=True)
