"""Ask a Ray cluster for CPUs, and wait until its nodes have them.

Run `python deploy/wait_for_cpus.py 64` before `freerun train … --num-workers 64 --cpus-per-worker 1`: a run refuses to
start on a cluster that is too small for its workers, and an autoscaler starts nodes only when somebody asks for them.
The request stands until the next one, so `python deploy/wait_for_cpus.py 0` lets idle nodes go. Without an autoscaler,
this only waits for nodes that are still starting.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

import ray
from ray.autoscaler.sdk import request_resources

LOOK_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when the CPUs are there, and 1 if they are not there in time."""
    parser = argparse.ArgumentParser(description="Ask a Ray cluster for CPUs, and wait until its nodes have them.")
    parser.add_argument("cpus", type=int, help="CPUs of all nodes together; 0 takes an earlier request back")
    parser.add_argument("--ray-address", default="auto", help="as for freerun train")
    parser.add_argument("--timeout-seconds", type=float, default=900.0, help="give up after this time")
    given = parser.parse_args(arguments)
    if given.cpus < 0:
        parser.error(f"the number of CPUs must be 0 or more, not {given.cpus}")
    ray.init(given.ray_address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    request_resources(num_cpus=given.cpus)
    deadline = time.monotonic() + given.timeout_seconds
    while (found := ray.cluster_resources().get("CPU", 0.0)) < given.cpus:
        if time.monotonic() > deadline:
            print(f"the cluster has {found:g} of {given.cpus} CPUs after {given.timeout_seconds:g} s", file=sys.stderr)
            return 1
        time.sleep(LOOK_SECONDS)
    print(f"the cluster has {found:g} CPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
