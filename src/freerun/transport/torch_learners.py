"""Several learners that exchange data through torch.distributed: gloo on CPUs, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from freerun.core import LearnerFailure, UserError
from freerun.transport.learner_place import LearnerPlace

Value = TypeVar("Value")

JOIN_SECONDS = 300.0
"""A learner waits this long for the others to start. On a busy machine, importing torch alone takes a while."""
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0001, 0.005
"""The pause between two checks whether all learners have arrived. It doubles from the first to the second."""
REASON_SECONDS = 5.0
"""A connection breaks this long, at most, before it is known why."""
EXCHANGE_SECONDS = 600.0
"""torch's own limit for one exchange. All learners have met just before it, so none of them is that late."""


def listen(host: str) -> socket.socket:
    """Listen on a free port of this address alone. torch by itself would listen on all addresses."""
    return socket.create_server((host, 0))


class TorchLearnerGroup:
    """The learners of a run, as one of them sees them.

    Nothing can interrupt torch while it waits for another learner, neither Ctrl-C nor the news that the other is gone.
    So before an exchange that some may be late to, the learners `_meet` in a loop that can be interrupted. Sums follow
    each other within an update, so nobody is late to them, and they need no meeting.
    """

    def __init__(
        self,
        place: LearnerPlace,
        device: str,
        server: socket.socket | None = None,
        check: Callable[[], None] | None = None,
    ):
        """The first learner brings the `server` at which they meet. `check` raises the error that has ended another."""
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
        # NCCL allows one learner per GPU. Learners that share a GPU exchange through the CPU instead.
        own_gpu = device.startswith("cuda") and place.local_count <= torch.cuda.device_count()
        with _on_interface_of(place.host):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                store=PrefixStore("freerun", self._store),
                rank=place.index,
                world_size=place.count,
                timeout=timedelta(seconds=EXCHANGE_SECONDS),
            )

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum over all learners, in place."""
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            self._explain(error)

    def gather(self, value: Value) -> list[Value]:
        """The values of all learners, by index."""
        values: list[Any] = [None] * self.count
        try:
            self._meet()
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            self._explain(error)
        return values

    def _meet(self, deadline: float = float("inf")) -> None:
        """Wait until all learners have called this as often as this one."""
        number = self._num_meetings
        self._num_meetings += 1
        arrived, all_here = f"arrived/{number}", f"all/{number}"
        # The store adds atomically, so exactly one learner sees the full count: the last one.
        if self._store.add(arrived, 1) == self.count:
            self._store.set(all_here, "")
            if number:  # all have arrived here, so nobody waits for the meeting before any more
                self._store.delete_key(f"arrived/{number - 1}")
                self._store.delete_key(f"all/{number - 1}")
            return
        pause = SHORTEST_PAUSE_SECONDS
        while not self._store.check([all_here]):
            if self._check is not None:
                self._check()
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._store.add(arrived, 0)} of {self.count} learners have arrived in {JOIN_SECONDS:.0f} s: "
                    "were all started, and can they reach each other?"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _explain(self, error: RuntimeError) -> None:
        """Raise the reason why another learner is gone, or what torch says if no reason comes in time."""
        deadline = time.monotonic() + REASON_SECONDS
        while self._check is not None and time.monotonic() < deadline:
            self._check()
            time.sleep(0.05)
        # gloo begins its message with the name of its source file in brackets.
        why = str(error).splitlines()[0].partition("] ")[2].partition(". ")[0] or error
        raise LearnerFailure(f"another learner is gone: {why}") from None

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        del self._store


@contextlib.contextmanager
def _on_interface_of(host: str) -> Iterator[None]:
    """Have gloo listen on the network interface from which this host is reached.

    By default gloo listens on the address that the machine's own name points to, which may be another network.
    """
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ:
        yield
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # connecting UDP sends nothing: the kernel only chooses the interface
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
