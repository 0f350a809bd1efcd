"""CybORG's own simulation without its costly parts. It imports CybORG, so only `cyborg.load` may import it.

Agents, actions, rewards and the detection of anomalies are CybORG's code. Some work is done once instead of repeatedly:
parsing the scenario, listing subnets, enumerating Blue's actions. Some is left out: the description of the whole
network at every step, although rewards read only three things from it, and the copying and printing of Blue's table,
although only 52 bits are read from it. Tests compare the results with CybORG's ChallengeWrapper, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import CybORG as package
import numpy as np
from CybORG import CybORG
from CybORG.Agents.Wrappers import BlueTableWrapper, EnumActionWrapper
from CybORG.Shared import Observation
from CybORG.Simulator import Host as host_module
from CybORG.Simulator import State as state_module
from CybORG.Simulator.SimulationController import SimulationController

from freerun.core import FloatArray

SCENARIO = Path(package.__file__).parent / "Shared" / "Scenarios" / "Scenario2.yaml"
ACTIVITY = {"None": (0, 0), "Scan": (1, 0), "Exploit": (1, 1)}
COMPROMISED = {"No": (0, 0), "Unknown": (1, 0), "User": (0, 1), "Privileged": (1, 1)}
# CybORG's own table takes files of at least this density for malware.
MALWARE_DENSITY = 0.9
OT_SERVICE = "OTService"
PRIVILEGED = ("root", "SYSTEM")

_scenarios: dict[str, bytes] = {}
"""Parsed scenarios by path, pickled."""


class CachedNetwork(IPv4Network):
    """An IPv4Network that lists its subnets once. A reset draws 3 of 4,096, and listing them took half of its time."""

    def subnets(self, prefixlen_diff: int = 1, new_prefix: int | None = None) -> Any:
        return _subnets(IPv4Network(self), prefixlen_diff, new_prefix)


@functools.cache
def _subnets(network: IPv4Network, prefixlen_diff: int, new_prefix: int | None) -> tuple[IPv4Network, ...]:
    return tuple(network.subnets(prefixlen_diff, new_prefix))


@contextlib.contextmanager
def _shortcuts() -> Iterator[None]:
    """Replace two slow functions of CybORG while it sets up a network.

    A host copies what it is made of, but the backup at the end of the setup replaces those copies anyway."""
    shortcuts = ((state_module, "IPv4Network", CachedNetwork), (host_module, "deepcopy", lambda original: original))
    plain = [getattr(module, name) for module, name, _ in shortcuts]
    for module, name, shortcut in shortcuts:
        setattr(module, name, shortcut)
    try:
        yield
    finally:
        for (module, name, _), original in zip(shortcuts, plain, strict=True):
            setattr(module, name, original)


class FastController(SimulationController):
    """CybORG's controller. While it steps, its true state contains only what the reward calculators read."""

    def __init__(self, *args: Any, **options: Any):
        self._stepping = False
        self._last_map: Any = None
        with _shortcuts():
            super().__init__(*args, **options)

    def _parse_scenario(self, path: str, *args: Any, **options: Any) -> Any:
        if path not in _scenarios:
            _scenarios[path] = pickle.dumps(super()._parse_scenario(path, *args, **options))
        return pickle.loads(_scenarios[path])  # a new copy, because a simulation may change its scenario

    def reset(self, agent: str | None = None) -> Any:
        with _shortcuts():
            result = super().reset(agent)
        hosts = self.state.hosts.items()
        self._ot_hosts = {name for name, host in hosts if any(process.name == OT_SERVICE for process in host.processes)}
        return result

    def step(self, *args: Any, **options: Any) -> Any:
        self._stepping = True
        try:
            return super().step(*args, **options)
        finally:
            self._stepping = False

    def get_true_state(self, info: Any) -> Any:
        if not self._stepping:
            return super().get_true_state(info)
        state, truth = self.state, Observation()
        for name, host in state.hosts.items():
            known = truth.data[name] = {
                "System info": {"Hostname": name, "OSType": host.os_type},
                "Sessions": [
                    {"Agent": agent, "Username": state.sessions[agent][number].username}
                    for agent, numbers in host.sessions.items()
                    for number in numbers
                ],
            }
            if name in self._ot_hosts:  # the reward reads from the processes whether the service runs
                known.update(state.get_true_state({name: {"Processes": ["All"]}}).data.get(name, {}))
        return truth

    def _filter_obs(self, obs: Any, agent_name: str | None = None) -> Any:
        if self._last_map is not self.hostname_ip_map:  # every reset makes a new one
            self._last_map = self.hostname_ip_map
            # `filter_addresses` compares strings. They are made once per episode and not at every call.
            self._addresses = [str(address) for address in self.hostname_ip_map.values()]
            names = {agent: self.scenario.get_agent_info(agent).allowed_subnets for agent in self.scenario.agents}
            names[None] = list(self.subnet_cidr_map)
            self._subnets = {agent: [str(self.subnet_cidr_map[name]) for name in names[agent]] for agent in names}
        if len(obs.data) > 1:  # otherwise it only says whether the action succeeded
            obs.filter_addresses(ips=self._addresses, cidrs=self._subnets[agent_name], include_localhost=False)
        return obs


class FastCybORG(CybORG):
    def _create_env_controller(self, env_config: Any, agents: Any) -> FastController:
        return FastController(self.scenario_file, agents=agents)


class FastTable(BlueTableWrapper):
    """What Blue knows about each host: CybORG's table, read without copying and printing it."""

    def observe(self, observation: Any) -> FloatArray:
        self._process_last_action()
        known, activity = self.blue_info, {}
        for name, anomalies in self._detect_anomalies(observation).items():
            if "Processes" in anomalies:
                activity[name] = self._interpret_connections(anomalies["Processes"])
                if activity[name] == "Exploit":
                    known[name][-1] = "User"
            if any(file["Density"] >= MALWARE_DENSITY for file in anomalies.get("Files", ())):
                known[name][-1] = "Privileged"
        bits: list[int] = []
        for name, row in known.items():
            bits += ACTIVITY[activity.get(name, "None")]
            bits += COMPROMISED[row[-1]]
        return np.array(bits, np.float32)


class Cage2Simulator:
    """CAGE challenge 2: Blue, whose actions are passed to `step`, against one of CybORG's red agents."""

    def __init__(self, red_agent: Any):
        simulation = FastCybORG(str(SCENARIO), "sim", agents={"Red": red_agent})
        self.controller = simulation.environment_controller
        self._table = FastTable(simulation, output_mode="vector")
        enumeration = EnumActionWrapper(simulation)
        enumeration.get_action_space("Blue")
        self.actions: list[Any] = enumeration.possible_actions
        """Blue's actions, by their number. They have no state, so the same objects serve every step."""
        self.reset()
        self.hosts = list(self._table.blue_info)
        """The names of the hosts, in the order of the observation, which has four numbers for each."""

    def reset(self) -> FloatArray:
        """Begin an episode. Blue compares later observations with the first one, in which nothing stands out yet."""
        self._table._process_initial_obs(self.controller.reset("Blue").observation)
        return np.zeros(4 * len(self._table.blue_info), np.float32)

    def step(self, action: int) -> tuple[FloatArray, float, bool]:
        result = self.controller.step("Blue", self.actions[action])
        return self._table.observe(result.observation), float(result.reward), bool(result.done)

    def host_status(self) -> dict[str, int]:
        """Red's best access to each host where it has a session: 1 as a user, 2 with all privileges."""
        status: dict[str, int] = {}
        for session in self.controller.state.sessions["Red"].values():
            access = 2 if session.username in PRIVILEGED else 1
            status[session.host] = max(access, status.get(session.host, 0))
        return status
