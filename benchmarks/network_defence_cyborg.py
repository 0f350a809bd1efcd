"""CybORG for benchmarks/network_defence.py: its episodes, and the same ones again in NetworkDefence."""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from freerun_envs import network_red as red
from freerun_envs.network_defence import (
    FAVOURITE_CHANCE,
    NOTICE_DRAW,
    SERVICE_DRAW,
    TARGET_DRAW,
    NetworkDefenceVector,
)
from freerun_envs.network_hosts import HOSTS, NUM_HOSTS, SERVICE_MEMBERS, SERVICES, SUBNETS, USER0

NUM_STEPS = 100
KINDS = {
    "DiscoverRemoteSystems": red.SWEEP,
    "DiscoverNetworkServices": red.SCAN,
    "ExploitRemoteService": red.EXPLOIT,
    "PrivilegeEscalate": red.ESCALATE,
    "Impact": red.IMPACT,
}
EXPLOITS = {
    "FTPDirectoryTraversal": "ftp",
    "HarakaRCE": "smtp",
    "SQLInjection": "sql",
    "HTTPSRFI": "https",
    "HTTPRFI": "http",
    "EternalBlue": "smb",
    "BlueKeep": "rdp",
    "SSHBruteForce": "ssh",
}


class Simulator:
    """Blue's view of CybORG, and what is to be known of red's last move."""

    def __init__(self, path: Path, red_agent: str):
        sys.path.insert(0, str(path))
        sys.modules.setdefault("gym", gymnasium)  # the old gym is not needed, only its names
        with warnings.catch_warnings(action="ignore"):
            cyborg = importlib.import_module("CybORG")
            agents = importlib.import_module("CybORG.Agents")
            wrappers = importlib.import_module("CybORG.Agents.Wrappers")
            exploits: Any = importlib.import_module("CybORG.Shared.Actions.ConcreteActions.ExploitAction")
        scenario = path / "CybORG" / "Shared" / "Scenarios" / "Scenario2.yaml"
        self._cyborg = cyborg.CybORG(str(scenario), "sim", agents={"Red": getattr(agents, red_agent)})
        self._env = wrappers.ChallengeWrapper(env=self._cyborg, agent_name="Blue", max_steps=NUM_STEPS)
        self.notice_draw = 0.0
        """The random number that decided whether the last exploit was noticed."""
        draw = exploits.random

        def remember() -> float:
            self.notice_draw = draw()
            return self.notice_draw

        exploits.random = remember

    def reset(self, seed: int) -> NDArray[Any]:
        self._cyborg.set_seed(seed)
        obs: NDArray[Any] = self._env.reset()
        self._names = {str(address): name for name, address in self._cyborg.get_ip_map().items()}
        controller = self._cyborg.environment_controller
        self._subnets = {str(cidr): name for name, cidr in controller.subnet_cidr_map.items()}
        return obs

    def step(self, action: int) -> tuple[NDArray[Any], float]:
        obs, reward, _, _ = self._env.step(action)
        return obs, float(reward)

    def red_move(self) -> tuple[int, int, int | None]:
        """Its kind, the hosts that it may be aimed at (a set), and the service that was exploited."""
        action = self._cyborg.get_last_action("Red")
        kind = KINDS[type(action).__name__]
        exploit = getattr(action, "sub_action", None)
        service = SERVICES.index(EXPLOITS[type(exploit).__name__]) if exploit else None
        if kind == red.SWEEP:
            return kind, SUBNETS[("Enterprise", "Operational", "User").index(self._subnets[str(action.subnet)])], None
        name = action.hostname if hasattr(action, "hostname") else self._names[str(action.ip_address)]
        return kind, 1 << HOSTS.index(name), service

    def host_status(self) -> list[int]:
        status = [0] * NUM_HOSTS
        for session in self._cyborg.environment_controller.state.sessions["Red"].values():
            host = HOSTS.index(session.host)
            status[host] = max(status[host], 1 + (session.username in ("root", "SYSTEM")))
        return status

    def last_success(self) -> bool:
        return str(self._cyborg.get_observation("Blue")["success"]) != "FALSE"


@dataclass
class DiceReport:
    num_steps: int = 0
    num_equal: int = 0


def replay(path: Path, red_agent: str, num_episodes: int) -> DiceReport:
    """Play CybORG with a busy defender, then each step in NetworkDefence with the random numbers that fit it."""
    simulator = Simulator(path, red_agent)
    report = DiceReport()
    for episode in range(num_episodes):
        rng = np.random.default_rng(episode)
        obs = simulator.reset(seed=episode)
        network = NetworkDefenceVector(1, red_agent, NUM_STEPS)
        network.reset([0])
        for step in range(NUM_STEPS):
            action = busy_defender(obs, rng)
            obs, reward = simulator.step(action)
            network.draws[0, step] = fitting_draws(network, simulator, step)
            again = network.step(np.array([action]))
            report.num_steps += 1
            report.num_equal += bool(
                np.array_equal(again.obs[0], obs)
                and np.isclose(again.reward[0], reward, atol=1e-9)
                and network.host_status()[0].tolist() == simulator.host_status()
                and network.last_success[0] == simulator.last_success()
            )
    return report


def busy_defender(obs: NDArray[Any], rng: np.random.Generator) -> int:
    """Any action but mostly decoys and Remove, mostly where something was seen: to meet as many rules as possible."""
    seen = np.flatnonzero(obs.reshape(NUM_HOSTS, 4).any(axis=1))
    host = int(rng.choice(seen)) if len(seen) and rng.random() < 0.7 else int(rng.integers(NUM_HOSTS))
    family = int(rng.choice([0, *[1] * 3, *[2] * 4, *range(3, 11), 11, 11]))  # Sleep, Analyse, Remove, decoys, Restore
    return 0 if family == 0 else 2 + (family - 1) * NUM_HOSTS + host


def fitting_draws(network: NetworkDefenceVector, simulator: Simulator, step: int) -> NDArray[np.float64]:
    """Random numbers with which NetworkDefence's red does what CybORG's has done, as far as there are any."""
    kind, hosts, service = simulator.red_move()
    host = hosts.bit_length() - 1
    if isinstance(network.red, red.BLineAgent) and step == 1:  # the first host is drawn at the reset
        network.red.route[0] = host - USER0 - 1
    draws = np.zeros(3)
    draws[NOTICE_DRAW] = simulator.notice_draw
    for target_draw in (np.arange(1000) + 0.5) / 1000:
        chosen_kind, chosen_host = network.red.choose(np.array([target_draw]))
        if chosen_kind[0] == kind and hosts >> int(chosen_host[0]) & 1:
            draws[TARGET_DRAW] = target_draw
            break
    if service is not None:
        found = list(dict.fromkeys(SERVICE_MEMBERS[network.found_services[host]].tolist()))
        if service in found[1:]:
            place = (found.index(service) - 0.5) / (len(found) - 1)
            draws[SERVICE_DRAW] = FAVOURITE_CHANCE + (1 - FAVOURITE_CHANCE) * place
    return draws
