"""The thirteen hosts of NetworkDefence: subnets, services, what an exploit gains, which decoys fit, what a loss costs.

The facts are those of CAGE challenge 2's second scenario. A set of hosts is an integer with a bit per host, a set of
services one with a bit per service, so that thousands of networks fit into a few arrays and a choice is a table lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NO_ACCESS, USER_ACCESS, ADMIN_ACCESS = range(3)

SERVICES = ("ftp", "smtp", "sql", "https", "http", "smb", "rdp", "ssh")
"""In the order in which red prefers to exploit them; `NO_SERVICE` stands for none."""
SSH, NO_SERVICE = SERVICES.index("ssh"), len(SERVICES)


@dataclass(frozen=True)
class Machine:
    num_ports: int
    """How many a scan finds, decoys aside."""
    services: dict[str, int]
    """The access that an exploit of each gains."""
    closed: frozenset[str] = field(default=frozenset())
    """Services that another program only seems to offer: red may try them, in vain and unseen."""
    windows: bool = False


GATEWAY = Machine(1, {"ssh": USER_ACCESS})
DEFENDER = Machine(3, {"ssh": NO_ACCESS})
OFFICE_SERVER = Machine(
    7,
    {"https": USER_ACCESS, "http": USER_ACCESS, "rdp": ADMIN_ACCESS, "ssh": USER_ACCESS},
    closed=frozenset({"smb"}),
    windows=True,
)
FTP_DESKTOP = Machine(2, {"ftp": ADMIN_ACCESS, "ssh": USER_ACCESS}, windows=True)
RDP_DESKTOP = Machine(4, {"smb": ADMIN_ACCESS, "rdp": USER_ACCESS}, windows=True)
WEB_DESKTOP = Machine(4, {"smtp": ADMIN_ACCESS, "https": USER_ACCESS, "http": USER_ACCESS}, closed=frozenset({"rdp"}))
SQL_DESKTOP = Machine(5, {**WEB_DESKTOP.services, "sql": ADMIN_ACCESS, "ssh": USER_ACCESS})

MACHINES = {
    "Defender": DEFENDER,
    "Enterprise0": GATEWAY,
    "Enterprise1": OFFICE_SERVER,
    "Enterprise2": OFFICE_SERVER,
    "Op_Host0": GATEWAY,
    "Op_Host1": GATEWAY,
    "Op_Host2": GATEWAY,
    "Op_Server0": GATEWAY,
    "User0": FTP_DESKTOP,
    "User1": FTP_DESKTOP,
    "User2": RDP_DESKTOP,
    "User3": WEB_DESKTOP,
    "User4": SQL_DESKTOP,
}
HOSTS = tuple(MACHINES)
NUM_HOSTS = len(HOSTS)
ENTERPRISE0, ENTERPRISE1, ENTERPRISE2 = (HOSTS.index(f"Enterprise{number}") for number in range(3))
OP_SERVER0, USER0 = HOSTS.index("Op_Server0"), HOSTS.index("User0")


def _hosts(*prefixes: str) -> int:
    return sum(1 << host for host, name in enumerate(HOSTS) if name.startswith(prefixes))


BIT: Ints = 1 << np.arange(NUM_HOSTS)
ENTERPRISE_SERVERS = _hosts("Enterprise")
OPERATIONAL = _hosts("Op_")
SUBNETS = (_hosts("Enterprise", "Defender"), OPERATIONAL, _hosts("User"))
SUBNET_HOSTS: Ints = np.array([next(subnet for subnet in SUBNETS if subnet >> host & 1) for host in range(NUM_HOSTS)])
"""Of each host, all hosts of its subnet."""
WAYS_IN: Ints = np.where(BIT & OPERATIONAL, ENTERPRISE_SERVERS, BIT[USER0])
"""To reach a host, red needs access to one of these; it always has User0."""

REVEALS: Ints = np.zeros(NUM_HOSTS, np.int64)
"""Whose address red reads on a host where it has admin access."""
for _revealed, _names in {
    ENTERPRISE1: ("User1", "User2"),
    ENTERPRISE0: ("User3", "User4"),
    OP_SERVER0: ("Enterprise2",),
}.items():
    REVEALS[[HOSTS.index(_name) for _name in _names]] = BIT[_revealed]


# ---------------------------------------------------------------------------------------------- services


def _services(names: dict[str, int] | frozenset[str]) -> int:
    return sum(1 << SERVICES.index(name) for name in names)


ANSWERING: Ints = np.array([_services(machine.services) for machine in MACHINES.values()])
OPEN: Ints = ANSWERING | np.array([_services(machine.closed) for machine in MACHINES.values()])
"""The services that a host offers, and those together with what a scan takes for one."""
NUM_PORTS: Ints = np.array([machine.num_ports for machine in MACHINES.values()])
ACCESS: Ints = np.array(
    [[machine.services.get(service, NO_ACCESS) for service in (*SERVICES, "none")] for machine in MACHINES.values()]
)
"""What an exploit gains, [host, service]."""

DECOYS = {
    "Apache": ("http", None),
    "Femitter": ("ftp", True),
    "HarakaSMPT": ("smtp", False),
    "Smss": ("smb", True),
    "SSHD": ("ssh", None),
    "Svchost": ("rdp", True),
    "Tomcat": ("https", None),
    "Vsftpd": ("http", False),
}
"""The service that a decoy pretends to be, and whether it runs on Windows only (True), on Linux only, or on both."""
VSFTPD = list(DECOYS).index("Vsftpd")
DECOY_BIT: Ints = np.array([1 << SERVICES.index(service) for service, _ in DECOYS.values()])
DECOY_FITS = np.array(
    [
        [
            windows in (None, machine.windows) and (name == "Vsftpd" or not OPEN[host] & DECOY_BIT[decoy])
            for host, machine in enumerate(MACHINES.values())
        ]
        for decoy, (name, (_, windows)) in enumerate(DECOYS.items())
    ]
)
"""Where a decoy's port is free. Vsftpd looks at the ftp port, which no Linux host uses, and then takes that of http."""
DECOY_ADDS: Ints = np.where(DECOY_FITS, DECOY_BIT[:, None] & ~ANSWERING, 0)
"""The service that it adds; none where a true one on the same port answers before it."""


# ---------------------------------------------------------------------------------------------- choices and losses


def _members(num_bits: int, nobody: int) -> tuple[Ints, Ints]:
    """Of each set its members, first to last and the last one repeated; and how many there are."""
    bits = np.arange(num_bits)
    contains = np.arange(1 << num_bits)[:, None] >> bits & 1
    num_members: Ints = contains.sum(axis=1)
    members_first = np.argsort(-contains, axis=1, kind="stable")
    members = np.take_along_axis(members_first, np.minimum(bits, np.maximum(num_members[:, None] - 1, 0)), axis=1)
    members[0] = nobody
    return members, num_members


HOST_MEMBERS, NUM_HOST_MEMBERS = _members(NUM_HOSTS, nobody=0)
SERVICE_MEMBERS, NUM_SERVICE_MEMBERS = _members(len(SERVICES), nobody=NO_SERVICE)

LOSS_TENTHS: Ints = np.array([1, 10, 10, 10, 1, 1, 1, 10, 0, 1, 1, 1, 1])
"""What a step costs, in tenths, while red has admin access to a host."""
_SETS = np.arange(1 << NUM_HOSTS)
ADMIN_LOSS_TENTHS: Ints = ((_SETS[:, None] >> np.arange(NUM_HOSTS)) & 1) @ LOSS_TENTHS
"""The same for a set of hosts; in whole tenths, so that sums are exact in any order."""
STOPPED_LOSS_TENTHS, RESTORE_LOSS_TENTHS = 100, 10
