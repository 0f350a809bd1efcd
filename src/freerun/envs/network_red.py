"""The red agents of NetworkDefence: each chooses what to attack next, for all networks at once.

`choose` changes nothing; `observe` is told what came of it. A network where red idles keeps its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from freerun.core import Array
from freerun.envs.network_hosts import (
    BIT,
    ENTERPRISE0,
    ENTERPRISE1,
    ENTERPRISE2,
    ENTERPRISE_SERVERS,
    HOST_MEMBERS,
    NUM_HOST_MEMBERS,
    OP_SERVER0,
    OPERATIONAL,
    REVEALS,
    SUBNET_HOSTS,
    USER0,
    Ints,
)

IDLE, IMPACT, SWEEP, SCAN, ESCALATE, EXPLOIT = range(6)
"""Stop the operational service; find a subnet's hosts; find a host's services; gain admin access; gain any access."""
NOTHING, FAILED, SUCCEEDED, FOUND_NOTHING = range(4)
"""What came of it. A scan of a host that cannot be reached succeeds and finds nothing."""


class Red(Protocol):
    def reset(self, rows: Ints, draw: Array) -> None:
        """New episodes in these networks, with a uniform random number each."""
        ...

    def choose(self, draw: Array) -> tuple[Ints, Ints]:
        """What to do, and to which host (for a sweep: any of the subnet)."""
        ...

    def observe(self, kind: Ints, host: Ints, outcome: Ints) -> None: ...


def groups(kind: Ints) -> Iterator[tuple[int, Ints]]:
    """Each kind that occurs, and the networks where it does."""
    if kind.size == 1:
        yield int(kind[0]), ONLY
        return
    for present in np.flatnonzero(np.bincount(kind)).tolist():
        yield present, np.flatnonzero(kind == present)


ONLY: Ints = np.zeros(1, np.int64)


class SleepAgent:
    """Never does anything."""

    def __init__(self, num_networks: int):
        self._idle: Ints = np.full(num_networks, IDLE)

    def reset(self, rows: Ints, draw: Array) -> None:
        pass

    def choose(self, draw: Array) -> tuple[Ints, Ints]:
        return self._idle, self._idle

    def observe(self, kind: Ints, host: Ints, outcome: Ints) -> None:
        pass


class BLineAgent:
    """Walks the shortest way to the operational server, and some stages back where one fails."""

    STAGE_KINDS: Ints = np.array([SWEEP, *(SCAN, EXPLOIT, ESCALATE) * 2, SWEEP, *(SCAN, EXPLOIT, ESCALATE) * 2, IMPACT])
    EXPLOITS_SERVER, LAST = 12, 14
    AFTER_FAILURE = (0, 1, *[2] * 4, *[5] * 4, *[9] * 3, 12, 13)
    """The stage that follows a failure of each: back to the exploit of this host or of the one before."""

    def __init__(self, num_networks: int):
        self._stage: Ints = np.zeros(num_networks, np.int64)
        self._route: Ints = np.zeros(num_networks, np.int64)
        self._has_tried_server = np.zeros(num_networks, bool)
        stages = np.arange(self.LAST + 1)
        onward = np.minimum(stages + 1, self.LAST)
        # By outcome: nothing, failed, succeeded, and twice for a scan that found nothing. Red plans the exploit of the
        # server from what its first scan found; as long as it has no plan, it goes back to its first host.
        self._next = np.array([stages, self.AFTER_FAILURE, onward, np.full_like(stages, 1), onward])
        self._hosts = np.array(
            [
                [USER0, *[USER0 + 1 + route] * 3, *[entry] * 4, *[ENTERPRISE2] * 3, *[OP_SERVER0] * 4]
                for route, entry in enumerate((ENTERPRISE1, ENTERPRISE1, ENTERPRISE0, ENTERPRISE0))
            ]
        )

    def reset(self, rows: Ints, draw: Array) -> None:
        self._stage[rows] = 0
        self._route[rows] = (draw * len(self._hosts)).astype(np.int64)
        self._has_tried_server[rows] = False

    def choose(self, draw: Array) -> tuple[Ints, Ints]:
        return self.STAGE_KINDS[self._stage], self._hosts[self._route, self._stage]

    def observe(self, kind: Ints, host: Ints, outcome: Ints) -> None:
        has_plan = self._has_tried_server & (outcome == FOUND_NOTHING)
        self._has_tried_server |= (self._stage == self.EXPLOITS_SERVER) & (kind != IDLE)
        self._stage = self._next[outcome + has_plan, self._stage]


class MeanderAgent:
    """Takes every host that it can find, in random order, and stops the service as soon as it may."""

    def __init__(self, num_networks: int):
        def nobody() -> Ints:
            return np.zeros(num_networks, np.int64)

        self._networks: Ints = np.arange(num_networks)
        self._subnets, self._swept = nobody(), nobody()
        """Hosts of the subnets that red knows of and of those it has swept."""
        self._known, self._scanned = nobody(), nobody()
        self._entered, self._exploited, self._escalated = nobody(), nobody(), nobody()
        """Where an exploit has ever succeeded; where red believes to have access now, and admin access."""

    def reset(self, rows: Ints, draw: Array) -> None:
        for hosts in (self._swept, self._scanned, self._entered, self._exploited, self._escalated):
            hosts[rows] = 0
        self._known[rows] = BIT[USER0]
        self._subnets[rows] = SUBNET_HOSTS[USER0]

    def choose(self, draw: Array) -> tuple[Ints, Ints]:
        to_escalate = (self._entered & self._exploited) | (~self._entered & BIT[USER0])
        candidates = np.array(
            [  # the first of these that is not empty, in the order of the numbers of the kinds
                self._escalated & BIT[OP_SERVER0],
                self._subnets & ~self._swept,
                self._known & ~self._scanned,
                to_escalate & ~self._escalated,
                self._known & ~self._exploited,
            ]
        )
        kind: Ints = (candidates != 0).argmax(axis=0)
        hosts = candidates[kind, self._networks]
        return kind + IMPACT, HOST_MEMBERS[hosts, (draw * NUM_HOST_MEMBERS[hosts]).astype(np.int64)]

    def observe(self, kind: Ints, host: Ints, outcome: Ints) -> None:
        for present, rows in groups(kind):
            hosts, bits = host[rows], BIT[host[rows]]
            succeeded = outcome[rows] >= SUCCEEDED
            if present == SWEEP:
                self._swept[rows] |= SUBNET_HOSTS[hosts]
                self._known[rows] |= SUBNET_HOSTS[hosts] * succeeded
            elif present == SCAN:
                self._scanned[rows] |= bits
            elif present == EXPLOIT:
                self._after_exploit(rows, bits, succeeded)
            elif present == ESCALATE:
                self._escalated[rows] |= bits * succeeded
                self._exploited[rows] &= ~(bits * ~succeeded)
                self._known[rows] |= REVEALS[hosts] * succeeded
                self._subnets[rows] |= SUBNET_HOSTS[hosts] * succeeded
            elif present == IMPACT:
                self._escalated[rows] &= ~(bits * ~succeeded)
                self._exploited[rows] &= ~(bits * ~succeeded)

    def _after_exploit(self, rows: Ints, bits: Ints, succeeded: Array) -> None:
        """A failure makes red doubt its access to the operational hosts, or else to the enterprise servers."""
        self._entered[rows] |= bits * succeeded
        self._exploited[rows] |= bits * succeeded
        escalated = self._escalated[rows]
        operational = escalated & OPERATIONAL
        doubted = np.where(operational, operational, escalated & ENTERPRISE_SERVERS) * ~succeeded
        self._escalated[rows] = escalated & ~doubted
        self._exploited[rows] &= ~doubted


RED_AGENTS: dict[str, type[SleepAgent] | type[BLineAgent] | type[MeanderAgent]] = {
    "B_lineAgent": BLineAgent,
    "RedMeanderAgent": MeanderAgent,
    "SleepAgent": SleepAgent,
}
