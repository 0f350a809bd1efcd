"""The red agents of NetworkDefence. Each chooses the next attack in all networks at once.

They follow the rules of CybORG's agents of the same names (CybORG/Agents/SimpleAgents: B_line.py, Meander.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from freerun.core import Array
from freerun_envs.network_hosts import (
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
"""Kinds of attack: do nothing, stop the operational service (IMPACT), find the hosts of a subnet (SWEEP), find the
services of a host (SCAN), turn any access to a host into admin access (ESCALATE), gain access to a host (EXPLOIT)."""
NOTHING, FAILED, SUCCEEDED, FOUND_NOTHING = range(4)
"""Outcomes of an attack. A scan of a host that cannot be reached succeeds and finds nothing, as in CybORG."""


class RedAgent(Protocol):
    def reset(self, rows: Ints, draw: Array) -> None:
        """Begin new episodes in these networks, with one uniform random number each."""
        ...

    def choose(self, draw: Array) -> tuple[Ints, Ints]:
        """The kind of the next attack in each network, and its host (for a sweep: any host of the subnet).

        It must not change the agent's state: where the episode has ended, the choice is replaced by IDLE."""
        ...

    def observe(self, kind: Ints, host: Ints, outcome: Ints) -> None:
        """Learn the outcomes of the attacks. Where the kind is IDLE, the agent's state stays as it is."""
        ...


def rows_by_kind(kind: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each kind that occurs, with the rows of the networks where it occurs."""
    if kind.size == 1:  # a single network: the general way below would take longer than the step itself
        yield int(kind[0]), ONLY_ROW
        return
    for present in np.flatnonzero(np.bincount(kind)).tolist():
        yield present, np.flatnonzero(kind == present)


ONLY_ROW: Ints = np.zeros(1, np.int64)


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
    """Takes the shortest way to the operational server in 15 stages, and goes some stages back where one fails.

    The way leads over a random user host, the enterprise server that this host reveals, Enterprise2 and Op_Server0.
    """

    STAGE_KINDS: Ints = np.array([SWEEP, *(SCAN, EXPLOIT, ESCALATE) * 2, SWEEP, *(SCAN, EXPLOIT, ESCALATE) * 2, IMPACT])
    """The kind of attack in each stage."""
    EXPLOITS_SERVER, LAST = 12, 14
    """The stage that exploits the operational server, and the last one, which stops its service."""
    AFTER_FAILURE = (0, 1, *[2] * 4, *[5] * 4, *[9] * 3, 12, 13)
    """The stage that follows a failure of each stage: back to the exploit of this host or of the one before."""

    def __init__(self, num_networks: int):
        self._stage: Ints = np.zeros(num_networks, np.int64)
        self.route: Ints = np.zeros(num_networks, np.int64)
        self._has_tried_server = np.zeros(num_networks, bool)
        stages = np.arange(self.LAST + 1)
        onward = np.minimum(stages + 1, self.LAST)
        # The next stage, [outcome, stage]. There are two rows for a scan that found nothing: red plans the exploit of
        # the server from what its first scan found. Without that plan it goes back to its first host (stage 1), with it
        # (outcome + 1) it goes on.
        self._next = np.array([stages, self.AFTER_FAILURE, onward, np.full_like(stages, 1), onward])
        # The host of each stage, [route, stage]: routes differ in the user host and the server that it reveals.
        self._hosts = np.array(
            [
                [USER0, *[USER0 + 1 + route] * 3, *[entry] * 4, *[ENTERPRISE2] * 3, *[OP_SERVER0] * 4]
                for route, entry in enumerate((ENTERPRISE1, ENTERPRISE1, ENTERPRISE0, ENTERPRISE0))
            ]
        )

    def reset(self, rows: Ints, draw: Array) -> None:
        self._stage[rows] = 0
        self.route[rows] = (draw * len(self._hosts)).astype(np.int64)
        self._has_tried_server[rows] = False

    def choose(self, draw: Array) -> tuple[Ints, Ints]:
        return self.STAGE_KINDS[self._stage], self._hosts[self.route, self._stage]

    def observe(self, kind: Ints, host: Ints, outcome: Ints) -> None:
        has_plan = self._has_tried_server & (outcome == FOUND_NOTHING)
        self._has_tried_server |= (self._stage == self.EXPLOITS_SERVER) & (kind != IDLE)
        self._stage = self._next[outcome + has_plan, self._stage]


class MeanderAgent:
    """Takes every host that it can find, in random order, and stops the operational service as soon as it can."""

    def __init__(self, num_networks: int):
        def no_hosts() -> Ints:
            return np.zeros(num_networks, np.int64)

        self._rows: Ints = np.arange(num_networks)
        # Sets of hosts, one per network.
        self._subnets, self._swept = no_hosts(), no_hosts()
        """The hosts of the subnets that red knows, and of those that it has swept."""
        self._known, self._scanned = no_hosts(), no_hosts()
        self._entered, self._exploited, self._escalated = no_hosts(), no_hosts(), no_hosts()
        """Where an exploit has ever succeeded; where red believes that it has access now; and admin access."""

    def reset(self, rows: Ints, draw: Array) -> None:
        for hosts in (self._swept, self._scanned, self._entered, self._exploited, self._escalated):
            hosts[rows] = 0
        self._known[rows] = BIT[USER0]
        self._subnets[rows] = SUBNET_HOSTS[USER0]

    def choose(self, draw: Array) -> tuple[Ints, Ints]:
        to_escalate = (self._entered & self._exploited) | (~self._entered & BIT[USER0])
        candidates = np.array(
            [  # red takes the first set that is not empty; they are in the order of the numbers IMPACT to EXPLOIT
                self._escalated & BIT[OP_SERVER0],
                self._subnets & ~self._swept,
                self._known & ~self._scanned,
                to_escalate & ~self._escalated,
                self._known & ~self._exploited,
            ]
        )
        kind: Ints = (candidates != 0).argmax(axis=0)
        hosts = candidates[kind, self._rows]
        # A uniform choice from the set: member number floor(draw * number of members).
        return kind + IMPACT, HOST_MEMBERS[hosts, (draw * NUM_HOST_MEMBERS[hosts]).astype(np.int64)]

    def observe(self, kind: Ints, host: Ints, outcome: Ints) -> None:
        for present, rows in rows_by_kind(kind):
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
        """A failed exploit makes red doubt its admin access to the operational hosts it holds.

        If it holds none of them, it doubts its access to the enterprise servers: it may have lost the way in."""
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
