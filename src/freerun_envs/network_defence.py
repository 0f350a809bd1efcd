"""The simulator of `freerun/NetworkDefence-v0`: defend a network of thirteen hosts, in the shape of CAGE challenge 2.

This is not CybORG (https://github.com/cage-challenge/CybORG). It implements the facts of that simulator (hosts, rules,
red agents, rewards) with arrays, and takes microseconds for a step where CybORG takes milliseconds.
benchmarks/network_defence.py compares their scores, and replays CybORG's episodes here step by step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import Array, EnvSpec, FloatArray, ObsGroups, StepResult, UserError, mask_space
from freerun_envs.network_actions import (
    ACTION_DECOY,
    ACTION_HOST,
    ACTION_KIND,
    ACTION_LOSS_TENTHS,
    ACTIONS,
    ANALYSE,
    CLEAN,
    DECOY,
    PRIVILEGED,
    REMOVE,
    RESTORE,
    SLEEP,
    UNKNOWN,
    USER,
    useful_actions,
)
from freerun_envs.network_hosts import (
    ACCESS,
    ADMIN_LOSS_TENTHS,
    ANSWERING,
    BIT,
    DECOY_ADDS,
    NO_ACCESS,
    NUM_HOSTS,
    NUM_PORTS,
    NUM_SERVICE_MEMBERS,
    OP_SERVER0,
    OPEN,
    SERVICE_MEMBERS,
    SSH,
    STOPPED_LOSS_TENTHS,
    USER0,
    USER_ACCESS,
    WAYS_IN,
    Ints,
    can_be_placed,
)
from freerun_envs.network_red import (
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
    RedAgent,
    rows_by_kind,
)

NUM_BITS = NUM_HOSTS * 4
QUIET, SCANNED, EXPLOITED = range(0, 12, 4)
"""The activity that Monitor reports on a host, in steps of 4, so that activity + belief numbers all 12 pairs."""
CELL_BITS = np.array(
    [(*activity, *belief) for activity in ((0, 0), (1, 0), (1, 1)) for belief in ((0, 0), (1, 0), (0, 1), (1, 1))],
    np.float32,
)
"""The four bits of a host in the observation, by the sum of activity and belief."""

FAVOURITE_CHANCE = 0.75
"""The probability that red exploits the service it prefers, and not one of the others that it has found."""
NOTICE_CHANCE = 0.95
"""The probability that an exploit, except of ssh, leaves a process that Monitor notices and Remove can stop."""
TARGET_DRAW, SERVICE_DRAW, NOTICE_DRAW = range(3)
"""What the uniform random numbers of a step decide: red's target, the service it exploits, whether it is noticed."""
NUM_DRAWS = 3


class NetworkDefenceVector:
    """A `VectorEnv` of many networks. An episode depends on its seed alone, not on the other networks.

    In each step blue acts, then red, then Monitor reports. CybORG's surprising rules are kept: Analyse sees the file
    that every exploit except of ssh leaves, and takes it for admin access; Remove cannot end an ssh login; and the
    operational service, once its host was restored, cannot be stopped again.

    Sets of hosts are integers with one bit per host, one per network. Arrays with one cell per host and network are
    flat, so that a choice of cells is one index. Every rule is applied to all networks where it is due at once.
    """

    def __init__(
        self, num_networks: int, red_agent: str = "B_lineAgent", episode_steps: int = 100, action_mask: bool = False
    ):
        """With `action_mask`, observations end with the mask of `useful_actions`."""
        if red_agent not in RED_AGENTS:
            raise UserError(f"NetworkDefence has no red_agent {red_agent!r}: use {', '.join(RED_AGENTS)}")
        if episode_steps < 1:
            raise UserError(
                f"NetworkDefence needs episode_steps of at least 1 (usual are 30, 50, 100), not {episode_steps}"
            )
        bits, actions = spaces.Box(0.0, 1.0, (NUM_BITS,), np.float32), spaces.Discrete(len(ACTIONS))
        self._has_mask = action_mask
        self.spec = EnvSpec(bits, actions)
        if action_mask:
            self.spec = EnvSpec.of_groups(ObsGroups(bits, None, mask_space(actions)), actions, reports_final_obs=True)
        self.num_envs = num_networks
        self.last_success = np.ones(num_networks, bool)
        """Whether blue's last action succeeded. Only a decoy whose port is in use fails."""
        self.last_red_action = (np.zeros(num_networks, np.int64),) * 3
        """Red's last attack, for pictures: its kind, its host (for a sweep any of the subnet) and its outcome."""
        self._episode_steps = episode_steps
        self.red: RedAgent = RED_AGENTS[red_agent](num_networks)
        self._first_cell: Ints = np.arange(num_networks) * NUM_HOSTS
        """The first cell of each network in the arrays with one cell per host."""
        self.draws: Array = np.zeros((num_networks, episode_steps + 1, NUM_DRAWS))
        """The random numbers of an episode, [network, step, draw]. The last step is zeros, for ended episodes."""
        self._first_draw: Ints = np.arange(num_networks) * (episode_steps + 1)
        self._steps: Ints = np.full(num_networks, episode_steps)
        self._any_has_ended = True
        self._admin_hosts: Ints = np.full(num_networks, BIT[USER0])
        self._noticed, self._unnoticed, self._malware = (np.zeros(num_networks, np.int64) for _ in range(3))
        """Sets of hosts: where red has a login as a user that Monitor has noticed, has not noticed, and red's files."""
        self._service_is_down, self._service_is_restored = np.zeros(num_networks, bool), np.zeros(num_networks, bool)
        """Whether red has stopped the operational service, and whether blue has ever restored its host."""
        self._decoy_services, self.found_services, self._belief = (
            np.zeros(num_networks * NUM_HOSTS, np.int64) for _ in range(3)
        )
        """By cell: the services of decoys, the services that red's last scan has found, and what blue believes."""
        self._obs: FloatArray = np.zeros((num_networks, NUM_BITS), np.float32)
        self._all_false = np.zeros(num_networks, bool)
        self._all_true = np.ones(num_networks, bool)
        self._no_cell: Ints = np.full(num_networks, -1)

    def reset(self, seeds: Sequence[int | None]) -> FloatArray:
        rows = np.array([row for row, seed in enumerate(seeds) if seed is not None], np.int64)
        for row in rows.tolist():
            np.random.default_rng(seeds[row]).random(out=self.draws[row, :-1])
        self._steps[rows] = 0
        self._any_has_ended = bool((self._steps == self._episode_steps).any())
        self._admin_hosts[rows] = BIT[USER0]
        for hosts in (self._noticed, self._unnoticed, self._malware, self._service_is_down, self._service_is_restored):
            hosts[rows] = 0
        for cells in (self._decoy_services, self.found_services, self._belief):
            cells.reshape(-1, NUM_HOSTS)[rows] = 0
        self.red.reset(rows, self.draws[rows, 0, TARGET_DRAW])
        # A copy: the result of the last step, which the caller may still hold, is this array.
        self._obs = self._obs.copy()
        self._obs[rows] = 0.0
        return self._rows(self._obs)

    def step(self, action: Array) -> StepResult:
        number = action.astype(np.uint32)  # a negative action becomes a huge number and is out of range, too
        kind, host, loss = ACTION_KIND[number], ACTION_HOST[number], ACTION_LOSS_TENTHS[number]
        has_ended = self._steps == self._episode_steps if self._any_has_ended else None
        if has_ended is not None:
            kind = np.where(has_ended, SLEEP, kind)
        # A single `take` of one row per network is faster than indexing with two arrays.
        draw = self.draws.reshape(-1, NUM_DRAWS).take(self._first_draw + self._steps, axis=0)

        analysed, decoyed = self._blue_acts(kind, host, ACTION_DECOY[number])
        red_kind, red_host = self.red.choose(draw[:, TARGET_DRAW])
        if has_ended is not None:
            red_kind = np.where(has_ended, IDLE, red_kind)
        outcome, activity = self._red_acts(red_kind, red_host, draw, decoyed)
        self.red.observe(red_kind, red_host, outcome)
        self.last_red_action = red_kind, red_host, outcome

        self._belief[analysed] = PRIVILEGED
        shown = self._belief.copy()
        shown[self._first_cell + red_host] += activity
        obs = CELL_BITS.take(shown, axis=0).reshape(self.num_envs, -1)
        loss = loss + ADMIN_LOSS_TENTHS[self._admin_hosts] + STOPPED_LOSS_TENTHS * self._service_is_down
        # Whole tenths until here: their sums are exact.
        reward = -loss / 10
        self._steps += 1
        if has_ended is not None:
            obs[has_ended], reward[has_ended] = self._obs[has_ended], 0.0
            self._steps -= has_ended
        truncated = self._steps == self._episode_steps
        self._any_has_ended = bool(np.count_nonzero(truncated))
        self._obs = obs
        obs = self._rows(obs)
        return StepResult(obs, obs, reward, self._all_false, truncated if has_ended is None else truncated & ~has_ended)

    def _rows(self, obs: FloatArray) -> FloatArray:
        """The observations, with the masks if they are wanted."""
        return np.concatenate([obs, self.action_masks()], axis=1, dtype=np.float32) if self._has_mask else obs

    def action_masks(self) -> NDArray[np.bool_]:
        """The actions that can be of use now, [network, action]."""
        return useful_actions(*(cells.reshape(-1, NUM_HOSTS) for cells in (self._belief, self._decoy_services)))

    def close(self) -> None:
        pass

    def num_decoys(self) -> Ints:
        """The number of services that decoys pretend on each host, [network, host]."""
        return NUM_SERVICE_MEMBERS[self._decoy_services].reshape(-1, NUM_HOSTS)

    def is_service_down(self) -> NDArray[np.bool_]:
        """Whether red has stopped the operational service, [network]."""
        return self._service_is_down

    def host_status(self) -> NDArray[np.int8]:
        """Red's true access to each host, [network, host]: 0 none, 1 user, 2 admin. User0 is always 2."""
        access = self._noticed | self._unnoticed | self._admin_hosts
        has_access, is_admin = access[:, None] & BIT != 0, self._admin_hosts[:, None] & BIT != 0
        status: NDArray[np.int8] = np.add(has_access, is_admin, dtype=np.int8)
        return status

    def _blue_acts(self, kind: Ints, host: Ints, decoy: Ints) -> tuple[Ints, Ints]:
        """Apply blue's actions. Return the cells where Analyse has found malware, and for each network the cell where a
        decoy was placed, or −1."""
        analysed, decoyed, self.last_success = NO_CELLS, self._no_cell, self._all_true
        for present, rows in rows_by_kind(kind):
            if present == SLEEP:
                continue
            bits, cells = BIT[host[rows]], self._first_cell[rows] + host[rows]
            if present == ANALYSE:
                analysed = cells[self._malware[rows] & bits != 0]
            elif present == REMOVE:
                self._noticed[rows] &= ~bits  # admin access and logins that were not noticed stay
                self._belief[cells] = np.minimum(self._belief[cells], UNKNOWN)
            elif present == DECOY:
                decoys = decoy[rows]
                placed = can_be_placed(self._decoy_services[cells], decoys, host[rows])
                self._decoy_services[cells] |= DECOY_ADDS[decoys, host[rows]] * placed
                decoyed, self.last_success = decoyed.copy(), self.last_success.copy()
                decoyed[rows] = np.where(placed, cells, -1)
                self.last_success[rows] = placed
            elif present == RESTORE:
                for hosts in (self._noticed, self._unnoticed, self._malware, self._admin_hosts):
                    hosts[rows] &= ~bits
                self._admin_hosts[rows] |= BIT[USER0]  # red's foothold cannot be taken away
                self._decoy_services[cells] = 0
                self._belief[cells] = CLEAN
                is_server = host[rows] == OP_SERVER0
                self._service_is_down[rows] &= ~is_server
                self._service_is_restored[rows] |= is_server
        return analysed, decoyed

    def _red_acts(self, kind: Ints, host: Ints, draw: Array, decoyed: Ints) -> tuple[Ints, Ints]:
        """Apply red's attacks. Return their outcomes, and the activity that Monitor sees on their hosts."""
        outcome, activity = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        for present, rows in rows_by_kind(kind):
            if present == IDLE:
                continue
            hosts = host[rows]
            access = self._noticed[rows] | self._unnoticed[rows] | self._admin_hosts[rows]
            has_access, is_reached = access & BIT[hosts] != 0, access & WAYS_IN[hosts] != 0
            if present == SWEEP:
                outcome[rows] = FAILED + is_reached  # FAILED + 1 is SUCCEEDED
            elif present == SCAN:
                outcome[rows] = np.where(is_reached, SUCCEEDED, FOUND_NOTHING)
                activity[rows] = self._scan(rows, hosts, is_reached, decoyed)
            elif present == EXPLOIT:
                gained, activity[rows] = self._exploit(rows, hosts, is_reached, decoyed, draw[rows])
                outcome[rows] = FAILED + gained
            elif present == ESCALATE:
                escalated = BIT[hosts] * has_access & ~self._admin_hosts[rows]
                self._admin_hosts[rows] |= escalated
                self._malware[rows] |= escalated
                outcome[rows] = FAILED + has_access
            elif present == IMPACT:
                self._service_is_down[rows] |= has_access & ~self._service_is_restored[rows]
                outcome[rows] = FAILED + has_access
        return outcome, activity

    def _scan(self, rows: Ints, hosts: Ints, is_reached: Array, decoyed: Ints) -> Array:
        """Red learns which services seem to run. Return the activity that Monitor sees."""
        cells = self._first_cell[rows] + hosts
        decoys = self._decoy_services[cells]
        self.found_services[cells] = np.where(is_reached, OPEN[hosts] | decoys, self.found_services[cells])
        # The report of a decoy placed on the host in this step covers a scan of fewer than three ports.
        is_covered = (decoyed[rows] == cells) & (NUM_PORTS[hosts] + NUM_SERVICE_MEMBERS[decoys] < 3)
        return np.where(is_reached & ~is_covered, SCANNED, QUIET)

    def _exploit(self, rows: Ints, hosts: Ints, is_reached: Array, decoyed: Ints, draw: Array) -> tuple[Array, Array]:
        """Red exploits a service that it has found. Return where it gains access, and what activity Monitor sees."""
        cells = self._first_cell[rows] + hosts
        found, chance = self.found_services[cells], draw[:, SERVICE_DRAW]
        # Below FAVOURITE_CHANCE red takes member 0, its favourite. The rest of the interval is stretched to a uniform
        # choice of members 1 to n - 1.
        other = 1 + (chance - FAVOURITE_CHANCE) / (1 - FAVOURITE_CHANCE) * (NUM_SERVICE_MEMBERS[found] - 1)
        service = SERVICE_MEMBERS[found, (other * (chance >= FAVOURITE_CHANCE)).astype(np.int64)]
        answers = is_reached & (((ANSWERING[hosts] | self._decoy_services[cells]) >> service & 1) != 0)
        access = ACCESS[hosts, service] * answers
        has_gained, is_ssh = access != NO_ACCESS, service == SSH
        is_noticed = (draw[:, NOTICE_DRAW] < NOTICE_CHANCE) & ~is_ssh

        bits = BIT[hosts] * has_gained
        as_user = bits * (access == USER_ACCESS)
        self._noticed[rows] |= as_user * is_noticed
        self._unnoticed[rows] |= as_user * ~is_noticed
        self._admin_hosts[rows] |= bits & ~as_user
        self._malware[rows] |= bits * ~is_ssh
        # Monitor takes many connections for an exploit and a single one for a scan. An exploit of ssh makes many login
        # attempts, and a noticed process has a connection of its own. The report about a decoy that was placed on the
        # host in this step replaces the report of a single connection; the two that a decoy attracts then look like an
        # exploit.
        is_covered = decoyed[rows] == cells
        is_loud = answers & (is_ssh | np.where(has_gained, is_noticed, is_covered))
        self._belief[cells[is_loud]] = USER
        return has_gained, np.where(is_loud, EXPLOITED, SCANNED * (answers & ~is_covered))


NO_CELLS: Ints = np.zeros(0, np.int64)
