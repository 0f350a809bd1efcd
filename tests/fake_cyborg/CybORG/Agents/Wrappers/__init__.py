"""From what Blue is told to 52 bits, and from numbers to actions."""

import copy
from typing import Any, ClassVar

import numpy as np
from gym import Env

from CybORG.Shared.Actions import OnHost

ACTIVITY = {"None": [0, 0], "Scan": [1, 0], "Exploit": [1, 1]}
COMPROMISED = {"No": [0, 0], "Unknown": [1, 0], "User": [0, 1], "Privileged": [1, 1]}


class BlueTableWrapper:
    def __init__(self, env: Any = None, agent: Any = None, output_mode: str = "table"):
        self.env = env
        self.blue_info: dict[str, list[str]] = {}

    def reset(self, agent: str = "Blue") -> Any:
        result = self.env.reset(agent)
        self._process_initial_obs(result.observation)
        result.observation = self._vector(self.blue_info)
        return result

    def step(self, agent: Any = None, action: Any = None) -> Any:
        result = self.env.step(agent, action)
        self._process_last_action()
        shown = copy.deepcopy(self.blue_info)
        for name, anomalies in self._detect_anomalies(copy.deepcopy(result.observation)).items():
            if "Processes" in anomalies:
                shown[name][-2] = self._interpret_connections(anomalies["Processes"])
                if shown[name][-2] == "Exploit":
                    shown[name][-1] = self.blue_info[name][-1] = "User"
            if any(file["Density"] >= 0.9 for file in anomalies.get("Files", [])):
                shown[name][-1] = self.blue_info[name][-1] = "Privileged"
        result.observation = self._vector(shown)
        return result

    def _process_initial_obs(self, obs: Any) -> None:
        self.baseline = {name: host for name, host in obs.items() if name != "success"}
        for name in self.baseline:
            self.blue_info[name] = [name, "None", "No"]

    def _process_last_action(self) -> None:
        action = self.env.get_last_action("Blue")
        kind, name = type(action).__name__, getattr(action, "hostname", "")
        if kind == "Restore":
            self.blue_info[name][-1] = "No"
        elif kind == "Remove" and self.blue_info[name][-1] != "No":
            self.blue_info[name][-1] = "Unknown"

    def _detect_anomalies(self, obs: Any) -> Any:
        return {name: host for name, host in obs.items() if name != "success" and host != self.baseline[name]}

    def _interpret_connections(self, activity: Any) -> str:
        ports = {connection["remote_port"] for process in activity for connection in process["Connections"]}
        return "Exploit" if 4444 in ports else "Scan"

    def _vector(self, shown: Any) -> Any:
        return np.array([bit for row in shown.values() for bit in ACTIVITY[row[-2]] + COMPROMISED[row[-1]]])


class EnumActionWrapper:
    calls: ClassVar[dict[str, int]] = {"enumerate": 0}

    def __init__(self, env: Any = None, agent: Any = None):
        self.env = env
        self.get_action_space("Red")

    def get_action_space(self, agent: str) -> int:
        self.calls["enumerate"] += 1
        space = self.env.get_action_space(agent)
        self.possible_actions: list[Any] = []
        for kind in space["action"]:
            self.possible_actions += [kind(it) for it in space["hostname"]] if issubclass(kind, OnHost) else [kind()]
        return len(self.possible_actions)


class ChallengeWrapper(Env):  # type: ignore[misc]
    def __init__(self, agent_name: str, env: Any, agent: Any = None, max_steps: int | None = None):
        self.table, self.enumeration, self.max_steps = BlueTableWrapper(env), EnumActionWrapper(env), max_steps

    def reset(self) -> Any:
        self.num_steps = 0
        return self.table.reset("Blue").observation

    def step(self, action: int) -> Any:
        self.enumeration.get_action_space("Blue")
        result = self.table.step("Blue", self.enumeration.possible_actions[action])
        self.num_steps += 1
        return result.observation, result.reward, result.done or self.num_steps == self.max_steps, {}
