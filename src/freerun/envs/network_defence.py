"""`freerun/NetworkDefence-v0`: defend a network of thirteen hosts, in the shape of CAGE challenge 2.

This is not CybORG: it is written from the facts of that simulator (hosts, rules, red agents, rewards) as arrays, and
takes microseconds for a step where CybORG takes milliseconds. benchmarks/network_defence.py compares their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import Array, EnvSpec, FloatArray, StepResult, UserError
from freerun.envs.network_hosts import (
    ACCESS,
    ADMIN_LOSS_TENTHS,
    ANSWERING,
    BIT,
    DECOY_ADDS,
    DECOY_BIT,
    DECOY_FITS,
    DECOYS,
    HOSTS,
    NO_ACCESS,
    NUM_HOSTS,
    NUM_PORTS,
    NUM_SERVICE_MEMBERS,
    OP_SERVER0,
    OPEN,
    RESTORE_LOSS_TENTHS,
    SERVICE_MEMBERS,
    SSH,
    STOPPED_LOSS_TENTHS,
    USER0,
    USER_ACCESS,
    VSFTPD,
    WAYS_IN,
    Ints,
)
from freerun.envs.network_red import (
    ESCALATE,
    EXPLOIT,
    FAILED,
    FOUND_NOTHING,
    IDLE,
    IMPACT,
    RED_AGENTS,
    SCAN,
    SUCCEEDED,
    SWEEP,
    Red,
    groups,
)

SLEEP, ANALYSE, REMOVE, DECOY, RESTORE = range(5)
ACTIONS = (
    ("Sleep", SLEEP, 0, 0),
    ("Monitor", SLEEP, 0, 0),  # every step ends with one, as in CybORG, so by itself it does nothing
    *((f"Analyse {name}", ANALYSE, host, 0) for host, name in enumerate(HOSTS)),
    *((f"Remove {name}", REMOVE, host, 0) for host, name in enumerate(HOSTS)),
    *(
        (f"Decoy{kind} {name}", DECOY, host, decoy)
        for decoy, kind in enumerate(DECOYS)
        for host, name in enumerate(HOSTS)
    ),
    *((f"Restore {name}", RESTORE, host, 0) for host, name in enumerate(HOSTS)),
)
ACTION_NAMES = tuple(name for name, *_ in ACTIONS)
ACTION_KIND, ACTION_HOST, ACTION_DECOY = (np.array(column) for column in list(zip(*ACTIONS, strict=True))[1:])
ACTION_LOSS_TENTHS: Ints = RESTORE_LOSS_TENTHS * (ACTION_KIND == RESTORE)

NUM_BITS = NUM_HOSTS * 4
CLEAN, UNKNOWN, USER, PRIVILEGED = range(4)
QUIET, SCANNED, EXPLOITED = range(0, 12, 4)
CELL_BITS = np.array(
    [(*activity, *belief) for activity in ((0, 0), (1, 0), (1, 1)) for belief in ((0, 0), (1, 0), (0, 1), (1, 1))],
    np.float32,
)
"""The four bits of a host, by the sum of the activity seen on it and the compromise believed."""

FAVOURITE_CHANCE = 0.75
"""That red exploits the service it prefers, and not one of the others that it has found."""
NOTICE_CHANCE = 0.95
"""That an exploit other than of ssh leaves a process that Monitor sees and Remove can stop."""
TARGET_DRAW, SERVICE_DRAW, NOTICE_DRAW = range(3)
NUM_DRAWS = 3


class NetworkDefenceVector:
    """Many networks stepped in one call; a `VectorEnv`. Episodes depend on their seed alone, not on their neighbours.

    In each step blue acts, then red, then Monitor reports. Where CybORG's rules surprise, they are kept: Analyse sees
    the file that any exploit but that of ssh leaves and takes it for admin access; Remove cannot end an ssh login; and
    the operational service, once restored from backup, cannot be stopped again.
    """

    def __init__(self, num_networks: int, red_agent: str = "B_lineAgent", episode_steps: int = 100):
        if red_agent not in RED_AGENTS:
            raise UserError(f"NetworkDefence has no red_agent {red_agent!r}: use {', '.join(RED_AGENTS)}")
        if episode_steps < 1:
            raise UserError(
                f"NetworkDefence needs episode_steps of at least 1 (usual are 30, 50, 100), not {episode_steps}"
            )
        self.spec = EnvSpec(spaces.Box(0.0, 1.0, (NUM_BITS,), np.float32), spaces.Discrete(len(ACTIONS)))
        self.num_envs = num_networks
        self.last_success = np.ones(num_networks, bool)
        """Whether blue's last action could be done; only a decoy whose port is in use cannot."""
        self._episode_steps = episode_steps
        self._red: Red = RED_AGENTS[red_agent](num_networks)
        self._rows: Ints = np.arange(num_networks) * NUM_HOSTS
        """Where each network begins in the arrays with a cell per host."""
        self._draws: Array = np.zeros((num_networks, episode_steps + 1, NUM_DRAWS))
        """All random numbers of an episode, and a row of zeros for those that rest."""
        self._first_draw: Ints = np.arange(num_networks) * (episode_steps + 1)
        self._steps: Ints = np.full(num_networks, episode_steps)
        self._any_resting = True
        self._admin: Ints = np.full(num_networks, BIT[USER0])
        self._seen, self._hidden, self._malware = (np.zeros(num_networks, np.int64) for _ in range(3))
        """Hosts with a login of red's as a user that Monitor has noticed, with one it has not, and with red's files."""
        self._stopped, self._unstoppable = np.zeros(num_networks, bool), np.zeros(num_networks, bool)
        """Whether the operational service is down, and whether it has been restored."""
        self._decoys, self._found, self._belief = (np.zeros(num_networks * NUM_HOSTS, np.int64) for _ in range(3))
        """Of each cell: services that decoys pretend, that red's last scan has found, and what Monitor believes."""
        self._obs: FloatArray = np.zeros((num_networks, NUM_BITS), np.float32)
        self._never = np.zeros(num_networks, bool)
        self._always = np.ones(num_networks, bool)
        self._nowhere: Ints = np.full(num_networks, -1)

    def reset(self, seeds: Sequence[int | None]) -> FloatArray:
        rows = np.array([row for row, seed in enumerate(seeds) if seed is not None], np.int64)
        for row in rows.tolist():
            np.random.default_rng(seeds[row]).random(out=self._draws[row, :-1])
        self._steps[rows] = 0
        self._any_resting = bool((self._steps == self._episode_steps).any())
        self._admin[rows] = BIT[USER0]
        for hosts in (self._seen, self._hidden, self._malware, self._stopped, self._unstoppable):
            hosts[rows] = 0
        for cells in (self._decoys, self._found, self._belief):
            cells.reshape(-1, NUM_HOSTS)[rows] = 0
        self._red.reset(rows, self._draws[rows, 0, TARGET_DRAW])
        self._obs = self._obs.copy()
        self._obs[rows] = 0.0
        return self._obs

    def step(self, action: Array) -> StepResult:
        number = action.astype(np.uint32)  # so that a negative one is out of range, too
        kind, host, loss = ACTION_KIND[number], ACTION_HOST[number], ACTION_LOSS_TENTHS[number]
        resting = self._steps == self._episode_steps if self._any_resting else None
        if resting is not None:
            kind = np.where(resting, SLEEP, kind)
        draw = self._draws.reshape(-1, NUM_DRAWS).take(self._first_draw + self._steps, axis=0)

        analysed, decoyed = self._blue_acts(kind, host, ACTION_DECOY[number])
        red_kind, red_host = self._red.choose(draw[:, TARGET_DRAW])
        if resting is not None:
            red_kind = np.where(resting, IDLE, red_kind)
        outcome, activity = self._red_acts(red_kind, red_host, draw, decoyed)
        self._red.observe(red_kind, red_host, outcome)

        self._belief[analysed] = PRIVILEGED
        shown = self._belief.copy()
        shown[self._rows + red_host] += activity
        obs = CELL_BITS.take(shown, axis=0).reshape(self.num_envs, -1)
        loss = loss + ADMIN_LOSS_TENTHS[self._admin] + STOPPED_LOSS_TENTHS * self._stopped
        reward = -loss / 10
        self._steps += 1
        if resting is not None:
            obs[resting], reward[resting] = self._obs[resting], 0.0
            self._steps -= resting
        truncated = self._steps == self._episode_steps
        self._any_resting = bool(np.count_nonzero(truncated))
        self._obs = obs
        return StepResult(obs, obs, reward, self._never, truncated if resting is None else truncated & ~resting)

    def close(self) -> None:
        pass

    def host_status(self) -> NDArray[np.int8]:
        """Red's true access to each host, [network, host]: 0 none, 1 user, 2 admin. User0 is always lost."""
        access = self._seen | self._hidden | self._admin
        has_access, is_admin = access[:, None] & BIT != 0, self._admin[:, None] & BIT != 0
        status: NDArray[np.int8] = np.add(has_access, is_admin, dtype=np.int8)
        return status

    def _blue_acts(self, kind: Ints, host: Ints, decoy: Ints) -> tuple[Ints, Ints]:
        """The cells where Analyse has found malware, and of each network the one where a decoy was placed (or −1)."""
        analysed, decoyed, self.last_success = NO_CELLS, self._nowhere, self._always
        for present, rows in groups(kind):
            if present == SLEEP:
                continue
            bits, cells = BIT[host[rows]], self._rows[rows] + host[rows]
            if present == ANALYSE:
                analysed = cells[self._malware[rows] & bits != 0]
            elif present == REMOVE:
                self._seen[rows] &= ~bits
                self._belief[cells] = np.minimum(self._belief[cells], UNKNOWN)
            elif present == DECOY:
                decoys = decoy[rows]
                is_free = (self._decoys[cells] & DECOY_BIT[decoys] == 0) | (decoys == VSFTPD)
                placed = DECOY_FITS[decoys, host[rows]] & is_free
                self._decoys[cells] |= DECOY_ADDS[decoys, host[rows]] * placed
                decoyed, self.last_success = decoyed.copy(), self.last_success.copy()
                decoyed[rows] = np.where(placed, cells, -1)
                self.last_success[rows] = placed
            elif present == RESTORE:
                for hosts in (self._seen, self._hidden, self._malware, self._admin):
                    hosts[rows] &= ~bits
                self._admin[rows] |= BIT[USER0]
                self._decoys[cells] = 0
                self._belief[cells] = CLEAN
                is_server = host[rows] == OP_SERVER0
                self._stopped[rows] &= ~is_server
                self._unstoppable[rows] |= is_server
        return analysed, decoyed

    def _red_acts(self, kind: Ints, host: Ints, draw: Array, decoyed: Ints) -> tuple[Ints, Ints]:
        """What came of it, and what Monitor sees on that host."""
        outcome, activity = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        for present, rows in groups(kind):
            if present == IDLE:
                continue
            hosts = host[rows]
            access = self._seen[rows] | self._hidden[rows] | self._admin[rows]
            has_access, is_reached = access & BIT[hosts] != 0, access & WAYS_IN[hosts] != 0
            if present == SWEEP:
                outcome[rows] = FAILED + is_reached
            elif present == SCAN:
                outcome[rows] = np.where(is_reached, SUCCEEDED, FOUND_NOTHING)
                activity[rows] = self._scan(rows, hosts, is_reached, decoyed)
            elif present == EXPLOIT:
                gained, activity[rows] = self._exploit(rows, hosts, is_reached, decoyed, draw[rows])
                outcome[rows] = FAILED + gained
            elif present == ESCALATE:
                escalated = BIT[hosts] * has_access & ~self._admin[rows]
                self._admin[rows] |= escalated
                self._malware[rows] |= escalated
                outcome[rows] = FAILED + has_access
            elif present == IMPACT:
                self._stopped[rows] |= has_access & ~self._unstoppable[rows]
                outcome[rows] = FAILED + has_access
        return outcome, activity

    def _scan(self, rows: Ints, hosts: Ints, is_reached: Array, decoyed: Ints) -> Array:
        """Red learns which services seem to run, and Monitor sees the scan."""
        cells = self._rows[rows] + hosts
        decoys = self._decoys[cells]
        self._found[cells] = np.where(is_reached, OPEN[hosts] | decoys, self._found[cells])
        # The report of a decoy placed on the host in this step covers a scan of fewer than three ports.
        is_covered = (decoyed[rows] == cells) & (NUM_PORTS[hosts] + NUM_SERVICE_MEMBERS[decoys] < 3)
        return np.where(is_reached & ~is_covered, SCANNED, QUIET)

    def _exploit(self, rows: Ints, hosts: Ints, is_reached: Array, decoyed: Ints, draw: Array) -> tuple[Array, Array]:
        """Red tries a service that it has found: whether it gains access, and what Monitor sees of it."""
        cells = self._rows[rows] + hosts
        found, chance = self._found[cells], draw[:, SERVICE_DRAW]
        other = 1 + (chance - FAVOURITE_CHANCE) / (1 - FAVOURITE_CHANCE) * (NUM_SERVICE_MEMBERS[found] - 1)
        service = SERVICE_MEMBERS[found, (other * (chance >= FAVOURITE_CHANCE)).astype(np.int64)]
        answers = is_reached & (((ANSWERING[hosts] | self._decoys[cells]) >> service & 1) != 0)
        access = ACCESS[hosts, service] * answers
        has_gained, is_ssh = access != NO_ACCESS, service == SSH
        is_noticed = (draw[:, NOTICE_DRAW] < NOTICE_CHANCE) & ~is_ssh

        bits = BIT[hosts] * has_gained
        as_user = bits * (access == USER_ACCESS)
        self._seen[rows] |= as_user * is_noticed
        self._hidden[rows] |= as_user * ~is_noticed
        self._admin[rows] |= bits & ~as_user
        self._malware[rows] |= bits * ~is_ssh
        # Monitor takes the many attempts at an ssh login and the connection of a noticed process for an exploit, a
        # single connection for a scan. The report of a decoy placed on the host in this step covers a single one, and
        # makes the two that a decoy attracts look like an exploit.
        is_covered = decoyed[rows] == cells
        is_loud = answers & (is_ssh | np.where(has_gained, is_noticed, is_covered))
        self._belief[cells[is_loud]] = USER
        return has_gained, np.where(is_loud, EXPLOITED, SCANNED * (answers & ~is_covered))


NO_CELLS: Ints = np.zeros(0, np.int64)


class NetworkDefence(gymnasium.Env[FloatArray, np.int64]):
    """One network: 52 bits (13 hosts × scan or exploit seen, compromise believed), 145 actions, `episode_steps` steps.

    A step costs 0.1 for each user or operational host and 1 for each enterprise server or operational server where red
    has admin access, 10 while the operational service is down, and 1 for a Restore. Episodes are truncated.
    """

    def __init__(self, red_agent: str = "B_lineAgent", episode_steps: int = 100):
        self._vector = NetworkDefenceVector(1, red_agent, episode_steps)
        self.observation_space = spaces.Box(0.0, 1.0, (NUM_BITS,), np.float32)
        self.action_space = spaces.Discrete(len(ACTIONS))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(2**63)) if seed is None else seed
        return self._vector.reset([episode_seed])[0], {}

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        obs, _, reward, _, truncated = self._vector.step(np.array([action]))
        return obs[0], float(reward[0]), False, bool(truncated[0]), {"success": bool(self._vector.last_success[0])}

    def host_status(self) -> NDArray[np.int8]:
        """Red's true access to each of the hosts: 0 none, 1 user, 2 admin. User0 is always lost."""
        status: NDArray[np.int8] = self._vector.host_status()[0]
        return status
