"""Several learners over torch.distributed: gloo between processors, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from freerun.core import LearnerFailure, UserError

JOIN_SECONDS = 300.0
"""How long a learner waits for the others to start: on a busy machine torch alone takes a while to import."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.005
"""Between two looks at whether all are there. While torch itself waits, nothing can interrupt it."""
REASON_SECONDS = 5.0
STEP_SECONDS = 600.0
"""Once all have met, none is far behind."""


@dataclass(frozen=True)
class Place:
    """One of several learners, and where they meet."""

    index: int
    count: int
    host: str
    port: int
    local_index: int
    """Among those on its machine."""
    local_count: int

    @classmethod
    def given_by_torchrun(cls) -> Place | None:
        """From the environment in which torchrun starts processes; None where there is only one."""
        if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        index, count, local_index, local_count, port = (int(os.environ[name]) for name in names)
        return cls(index, count, os.environ["MASTER_ADDR"], port, local_index, local_count)


def listen(host: str) -> socket.socket:
    """A free port on this address alone. (torch would listen on all of them.)"""
    return socket.create_server((host, 0))


class TorchPeers:
    """Waits for the others only where it can be interrupted: they `_meet` before they exchange anything that some may
    come late to. Sums follow each other within an update, so nobody is late to them."""

    def __init__(
        self, place: Place, device: str, server: socket.socket | None = None, check: Callable[[], None] | None = None
    ):
        """The first learner brings the `server` where they meet. `check` raises what has ended another one."""
        self.index, self.count = place.index, place.count
        self._check = check
        self._num_meetings = 0
        if place.given_by_torchrun() == place:
            self._store, _, _ = next(iter(rendezvous("env://")))
        else:
            self._store = TCPStore(
                place.host,
                place.port,
                is_master=server is not None,
                timeout=timedelta(seconds=JOIN_SECONDS),
                wait_for_workers=False,
                master_listen_fd=server.detach() if server is not None else None,
            )
        self._meet(time.monotonic() + JOIN_SECONDS)
        own_gpu = device.startswith("cuda") and place.local_count <= torch.cuda.device_count()
        with _on_interface_of(place.host):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                store=PrefixStore("freerun", self._store),
                rank=place.index,
                world_size=place.count,
                timeout=timedelta(seconds=STEP_SECONDS),
            )

    def sum(self, tensor: torch.Tensor) -> None:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            self._explain(error)

    def gather(self, thing: Any) -> list[Any]:
        everyones: list[Any] = [None] * self.count
        try:
            self._meet()
            dist.all_gather_object(everyones, thing)
        except RuntimeError as error:
            self._explain(error)
        return everyones

    def _meet(self, deadline: float = float("inf")) -> None:
        number = self._num_meetings
        self._num_meetings += 1
        arrived, all_here = f"arrived/{number}", f"all/{number}"
        if self._store.add(arrived, 1) == self.count:
            self._store.set(all_here, "")
            if number:  # all have left the one before
                self._store.delete_key(f"arrived/{number - 1}")
                self._store.delete_key(f"all/{number - 1}")
            return
        pause = SHORTEST_PAUSE
        while not self._store.check([all_here]):
            if self._check is not None:
                self._check()
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._store.add(arrived, 0)} of {self.count} learners have come in {JOIN_SECONDS:.0f} s: "
                    "were all started, and can they reach each other?"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _explain(self, error: RuntimeError) -> None:
        """A connection breaks a moment before it is known why."""
        deadline = time.monotonic() + REASON_SECONDS
        while self._check is not None and time.monotonic() < deadline:
            self._check()
            time.sleep(0.05)
        why = (
            str(error).splitlines()[0].partition("] ")[2].partition(". ")[0] or error
        )  # gloo names its own files first
        raise LearnerFailure(f"another learner is gone: {why}") from None

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        del self._store


@contextlib.contextmanager
def _on_interface_of(host: str) -> Any:
    """Gloo listens where the machine's name points to, unless told: it should be where the others are reached from."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ:
        yield
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
    found = [
        interface
        for interface, addresses in psutil.net_if_addrs().items()
        if any(address.address == own for address in addresses)
    ]
    if found:
        os.environ[name] = found[0]
    try:
        yield
    finally:
        if found:
            del os.environ[name]
