"""Turns."""

import json
from pathlib import Path
from typing import Any, ClassVar

from CybORG.Shared import Observation, Results
from CybORG.Shared.Actions import DECOYS, Analyse, Monitor, Remove, Restore, Sleep
from CybORG.Simulator.Host import SERVICE
from CybORG.Simulator.State import State


class AgentInfo:
    def __init__(self, allowed_subnets: list[str]):
        self.allowed_subnets = allowed_subnets


class Scenario:
    def __init__(self, parsed: Any):
        self.parsed = parsed
        self.agents = list(parsed["Agents"])

    def get_agent_info(self, agent: str) -> AgentInfo:
        return AgentInfo(self.parsed["Agents"][agent])


class SimulationController:
    calls: ClassVar[dict[str, int]] = {"parse": 0}

    def __init__(self, scenario_filepath: str, scenario_mod: Any = None, agents: Any = None):
        self.scenario = Scenario(self._parse_scenario(scenario_filepath))
        self.state = State(self.scenario)
        self.red = agents["Red"]()
        self.action: dict[str, Any] = {}
        self.observation: dict[str, Any] = {}
        self._map()
        everything = {"Processes": ["All"], "Sessions": "All", "System info": "All"}
        self.INFO_DICT = {"True": dict.fromkeys(self.state.hosts, everything)}
        self.INFO_DICT["Blue"] = {name: {"System info": "All"} for name in self.state.hosts}

    def _parse_scenario(self, scenario_filepath: str, scenario_mod: Any = None) -> Any:
        self.calls["parse"] += 1
        return json.loads(Path(scenario_filepath).read_text())

    def _map(self) -> None:
        self.hostname_ip_map = {name: address for address, name in self.state.ip_addresses.items()}
        self.subnet_cidr_map = self.state.subnet_name_to_cidr

    def reset(self, agent: Any = None) -> Results:
        self.state.reset()
        self._map()
        self.red.end_episode()
        self.observation["Blue"] = self._filter_obs(self.get_true_state(self.INFO_DICT["Blue"]), "Blue")
        return Results(self.observation["Blue"].data)

    def step(self, agent: Any = None, action: Any = None) -> Results:
        self.action = {"Blue": action, "Red": self.red.get_action(list(self.state.hosts))}
        seen = {name: self._filter_obs(it.sim_execute(self.state), name) for name, it in self.action.items()}
        truth = self._filter_obs(self.get_true_state(self.INFO_DICT["True"])).data
        reward = self._reward(truth) + action.cost
        told = self._filter_obs(Monitor().sim_execute(self.state), "Blue")
        for name, data in told.data.items():
            if name != "success":
                seen["Blue"].data.setdefault(name, {}).update(data)
        self.observation = seen
        return Results(seen["Blue"].data, round(reward, 1))

    def _reward(self, truth: Any) -> float:
        reward = 0.0
        for name, host in truth.items():
            if name == "success":
                continue
            if any(it["Agent"] == "Red" and it["Username"] == "root" for it in host["Sessions"]):
                reward -= 0.1 if host["System info"]["Hostname"].startswith("User") else 1.0
            if name in self.scenario.parsed["Services"]:
                reward -= 0.0 if any(it["Process Name"] == SERVICE for it in host["Processes"]) else 10.0
        return reward

    def get_true_state(self, info: Any) -> Observation:
        return self.state.get_true_state(info)

    def get_agent_state(self, agent: str) -> Observation:
        return self.get_true_state(self.INFO_DICT[agent])

    def _filter_obs(self, obs: Observation, agent_name: Any = None) -> Observation:
        obs.filter_addresses(self.hostname_ip_map.values(), self.subnet_cidr_map.values(), include_localhost=False)
        return obs

    def get_action_space(self, agent: str) -> Any:
        kinds = [Sleep, Monitor, Analyse, Remove, *DECOYS, Restore] if agent == "Blue" else [Sleep]
        return {"action": kinds, "hostname": list(self.state.hosts)}
