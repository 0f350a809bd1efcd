"""CybORG's own simulation with the costly parts left out; it imports CybORG, so `cyborg.load` imports it.

Agents, actions, rewards and the detection of anomalies are CybORG's code. Done once instead of again and again: parsing
the scenario, listing subnets, enumerating Blue's actions. Left out: writing down the whole network at every step, of
which rewards read three things, and copying and laying out Blue's table to read 52 bits from it. Tests hold the results
to those of CybORG's ChallengeWrapper, bit for bit.
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
MALWARE_DENSITY = 0.9
OT_SERVICE = "OTService"
PRIVILEGED = ("root", "SYSTEM")

_scenarios: dict[str, bytes] = {}


class Network(IPv4Network):
    """Lists its parts once: a reset draws three of 4,096, and to make them took half of its time."""

    def subnets(self, prefixlen_diff: int = 1, new_prefix: int | None = None) -> Any:
        return _parts(IPv4Network(self), prefixlen_diff, new_prefix)


@functools.cache
def _parts(network: IPv4Network, prefixlen_diff: int, new_prefix: int | None) -> tuple[IPv4Network, ...]:
    return tuple(network.subnets(prefixlen_diff, new_prefix))


@contextlib.contextmanager
def _shortcuts() -> Iterator[None]:
    """While a network is set up: hosts need no copies of what their backup, made at the end, replaces."""
    shortcuts = ((state_module, "IPv4Network", Network), (host_module, "deepcopy", lambda original: original))
    plain = [getattr(module, name) for module, name, _ in shortcuts]
    for module, name, shortcut in shortcuts:
        setattr(module, name, shortcut)
    try:
        yield
    finally:
        for (module, name, _), original in zip(shortcuts, plain, strict=True):
            setattr(module, name, original)


class Controller(SimulationController):
    """The simulation; while it steps, its true state holds no more than the reward calculators read."""

    def __init__(self, *args: Any, **options: Any):
        self._stepping = False
        self._known_map: Any = None
        with _shortcuts():
            super().__init__(*args, **options)

    def _parse_scenario(self, path: str, *args: Any, **options: Any) -> Any:
        if path not in _scenarios:
            _scenarios[path] = pickle.dumps(super()._parse_scenario(path, *args, **options))
        return pickle.loads(_scenarios[path])  # each simulation may change its own

    def reset(self, agent: str | None = None) -> Any:
        with _shortcuts():
            result = super().reset(agent)
        hosts = self.state.hosts.items()
        self._ot_hosts = {name for name, host in hosts if any(it.name == OT_SERVICE for it in host.processes)}
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
            if name in self._ot_hosts:  # whether the service runs is read from the processes
                known.update(state.get_true_state({name: {"Processes": ["All"]}}).data.get(name, {}))
        return truth

    def _filter_obs(self, obs: Any, agent_name: str | None = None) -> Any:
        if self._known_map is not self.hostname_ip_map:  # new with every reset
            self._known_map = self.hostname_ip_map
            # `filter_addresses` compares texts: made here once, and not at every call
            self._addresses = [str(address) for address in self.hostname_ip_map.values()]
            names = {agent: self.scenario.get_agent_info(agent).allowed_subnets for agent in self.scenario.agents}
            names[None] = list(self.subnet_cidr_map)
            self._subnets = {agent: [str(self.subnet_cidr_map[it]) for it in names[agent]] for agent in names}
        if len(obs.data) > 1:  # otherwise it says whether the action succeeded, and no more
            obs.filter_addresses(ips=self._addresses, cidrs=self._subnets[agent_name], include_localhost=False)
        return obs


class Simulation(CybORG):
    def _create_env_controller(self, env_config: Any, agents: Any) -> Controller:
        return Controller(self.scenario_file, agents=agents)


class Table(BlueTableWrapper):
    """What Blue knows of each host; CybORG's table, read without copying and drawing it."""

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


class Game:
    """One CAGE 2 game between Blue, who is asked for actions, and a red agent of CybORG's."""

    def __init__(self, red_agent: Any):
        simulation = Simulation(str(SCENARIO), "sim", agents={"Red": red_agent})
        self._controller = simulation.environment_controller
        self._table = Table(simulation, output_mode="vector")
        enumeration = EnumActionWrapper(simulation)
        enumeration.get_action_space("Blue")
        self.actions: list[Any] = enumeration.possible_actions
        """Blue's; they hold no state, so the same ones serve every step."""
        self.reset()
        self.hosts = list(self._table.blue_info)
        """In the order of the observation, four numbers each."""

    def reset(self) -> FloatArray:
        """What Blue sees at first is what it compares with later: nothing stands out."""
        self._table._process_initial_obs(self._controller.reset("Blue").observation)
        return np.zeros(4 * len(self._table.blue_info), np.float32)

    def step(self, action: int) -> tuple[FloatArray, float, bool]:
        result = self._controller.step("Blue", self.actions[action])
        return self._table.observe(result.observation), float(result.reward), bool(result.done)

    def host_status(self) -> dict[str, int]:
        """Red's best access to each host on which it has any: 1 as a user, 2 as one with all privileges."""
        status: dict[str, int] = {}
        for session in self._controller.state.sessions["Red"].values():
            access = 2 if session.username in PRIVILEGED else 1
            status[session.host] = max(access, status.get(session.host, 0))
        return status
