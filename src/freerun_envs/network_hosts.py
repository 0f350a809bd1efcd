"""The thirteen hosts of NetworkDefence as tables: subnets, services, what an exploit gains, which decoys fit, costs.

The facts are those of CAGE challenge 2 (https://github.com/cage-challenge/cage-challenge-2): Scenario2.yaml and the
images of the hosts in CybORG. A set of hosts is an integer with one bit per host, a set of services one with one bit
per service. So thousands of networks fit into a few arrays, and a random choice from a set is a table lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NO_ACCESS, USER_ACCESS, ADMIN_ACCESS = range(3)
"""Red's access to a host."""

SERVICES = ("ftp", "smtp", "sql", "https", "http", "smb", "rdp", "ssh")
"""The services, in the order in which red prefers to exploit them. The number `NO_SERVICE` stands for none of them."""
SSH, NO_SERVICE = SERVICES.index("ssh"), len(SERVICES)


@dataclass(frozen=True)
class HostMachine:
    """A kind of host."""

    num_ports: int
    """The number of open ports that a scan finds, without decoys."""
    services: dict[str, int]
    """Its services, and the access that an exploit of each gains."""
    closed: frozenset[str] = field(default=frozenset())
    """Services that a scan takes for real although another program has the port. Exploits of them fail, unnoticed."""
    windows: bool = False
    """Whether it runs Windows; otherwise Linux."""


GATEWAY = HostMachine(1, {"ssh": USER_ACCESS})
DEFENDER = HostMachine(3, {"ssh": NO_ACCESS})
OFFICE_SERVER = HostMachine(
    7,
    {"https": USER_ACCESS, "http": USER_ACCESS, "rdp": ADMIN_ACCESS, "ssh": USER_ACCESS},
    closed=frozenset({"smb"}),
    windows=True,
)
FTP_DESKTOP = HostMachine(2, {"ftp": ADMIN_ACCESS, "ssh": USER_ACCESS}, windows=True)
RDP_DESKTOP = HostMachine(4, {"smb": ADMIN_ACCESS, "rdp": USER_ACCESS}, windows=True)
WEB_DESKTOP = HostMachine(
    4, {"smtp": ADMIN_ACCESS, "https": USER_ACCESS, "http": USER_ACCESS}, closed=frozenset({"rdp"})
)
SQL_DESKTOP = HostMachine(5, {**WEB_DESKTOP.services, "sql": ADMIN_ACCESS, "ssh": USER_ACCESS})

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
    """The set of all hosts whose name begins with one of these."""
    return sum(1 << host for host, name in enumerate(HOSTS) if name.startswith(prefixes))


BIT: Ints = 1 << np.arange(NUM_HOSTS)
"""The set that contains one host alone, by host."""
ENTERPRISE_SERVERS = _hosts("Enterprise")
OPERATIONAL = _hosts("Op_")
SUBNETS = (_hosts("Enterprise", "Defender"), OPERATIONAL, _hosts("User"))
SUBNET_HOSTS: Ints = np.array([next(subnet for subnet in SUBNETS if subnet >> host & 1) for host in range(NUM_HOSTS)])
"""All hosts of the subnet of a host, by host."""
WAYS_IN: Ints = np.where(BIT & OPERATIONAL, ENTERPRISE_SERVERS, BIT[USER0])
"""To reach a host, red needs access to one of these hosts, by host. It always has User0."""

REVEALS: Ints = np.zeros(NUM_HOSTS, np.int64)
"""The hosts whose address red finds on a host where it has admin access, by host."""
for _revealed, _names in {
    ENTERPRISE1: ("User1", "User2"),
    ENTERPRISE0: ("User3", "User4"),
    OP_SERVER0: ("Enterprise2",),
}.items():
    REVEALS[[HOSTS.index(_name) for _name in _names]] = BIT[_revealed]


# ---------------------------------------------------------------------------------------------- services


def _services(names: dict[str, int] | frozenset[str]) -> int:
    """The set of these services."""
    return sum(1 << SERVICES.index(name) for name in names)


ANSWERING: Ints = np.array([_services(machine.services) for machine in MACHINES.values()])
OPEN: Ints = ANSWERING | np.array([_services(machine.closed) for machine in MACHINES.values()])
"""By host: the services that answer (ANSWERING), and those that a scan finds (OPEN), which include the closed ones."""
NUM_PORTS: Ints = np.array([machine.num_ports for machine in MACHINES.values()])
ACCESS: Ints = np.array(
    [[machine.services.get(service, NO_ACCESS) for service in (*SERVICES, "none")] for machine in MACHINES.values()]
)
"""The access that an exploit gains, [host, service]."""

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
"""The service that each decoy pretends to be, and where it runs: on Windows (True), on Linux (False), or on both."""
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
"""Whether a decoy's system is right and its port free, [decoy, host]. Vsftpd checks the ftp port, which no Linux host
uses, although it then takes the port of http: this is how CybORG behaves."""
DECOY_ADDS: Ints = np.where(DECOY_FITS, DECOY_BIT[:, None] & ~ANSWERING, 0)
"""The services that a decoy adds, [decoy, host]: none where a real service on the same port answers before it."""


def can_be_placed(decoy_services: Ints, decoy: Ints, host: Ints) -> NDArray[np.bool_]:
    """Whether a decoy fits a host that has the services of other decoys already. Vsftpd may even be there twice."""
    is_free = (decoy_services & DECOY_BIT[decoy] == 0) | (decoy == VSFTPD)
    fits: NDArray[np.bool_] = DECOY_FITS[decoy, host] & is_free
    return fits


# ---------------------------------------------------------------------------------------------- choices and losses


def _members(num_bits: int, of_empty_set: int) -> tuple[Ints, Ints]:
    """For each set: its members in order, padded with the last one, [set, bit]; and the number of members, [set].

    With these, the n-th member of a set is one lookup. The row of the empty set is filled with `of_empty_set`."""
    bits = np.arange(num_bits)
    contains = np.arange(1 << num_bits)[:, None] >> bits & 1
    num_members: Ints = contains.sum(axis=1)
    # A stable sort by "is no member" puts the members first, in their order.
    members_first = np.argsort(-contains, axis=1, kind="stable")
    members = np.take_along_axis(members_first, np.minimum(bits, np.maximum(num_members[:, None] - 1, 0)), axis=1)
    members[0] = of_empty_set
    return members, num_members


HOST_MEMBERS, NUM_HOST_MEMBERS = _members(NUM_HOSTS, of_empty_set=0)
SERVICE_MEMBERS, NUM_SERVICE_MEMBERS = _members(len(SERVICES), of_empty_set=NO_SERVICE)

# Defender, Enterprise0 to 2, Op_Host0 to 2, Op_Server0, User0 (red's foothold, which is free), User1 to 4.
LOSS_TENTHS: Ints = np.array([1, 10, 10, 10, 1, 1, 1, 10, 0, 1, 1, 1, 1])
"""The cost of a step, in tenths of a point, for each host where red has admin access."""
_SETS = np.arange(1 << NUM_HOSTS)
ADMIN_LOSS_TENTHS: Ints = ((_SETS[:, None] >> np.arange(NUM_HOSTS)) & 1) @ LOSS_TENTHS
"""The same for a set of hosts. Whole tenths make sums exact in any order."""
STOPPED_LOSS_TENTHS, RESTORE_LOSS_TENTHS = 100, 10
"""The cost of a step while the operational service is stopped, and the cost of a Restore, in tenths of a point."""
