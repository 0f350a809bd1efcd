"""The way in."""

import random
from typing import Any

from CybORG.Simulator.SimulationController import SimulationController


class CybORG:
    def __init__(self, scenario_file: str, environment: str = "sim", env_config: Any = None, agents: Any = None):
        self.scenario_file = scenario_file
        self.environment_controller = self._create_env_controller(env_config, agents)

    def _create_env_controller(self, env_config: Any, agents: Any) -> SimulationController:
        return SimulationController(self.scenario_file, agents=agents)

    def set_seed(self, seed: int) -> None:
        random.seed(seed)

    def reset(self, agent: Any = None) -> Any:
        return self.environment_controller.reset(agent)

    def step(self, agent: Any = None, action: Any = None) -> Any:
        return self.environment_controller.step(agent, action)

    def get_action_space(self, agent: str) -> Any:
        return self.environment_controller.get_action_space(agent)

    def get_last_action(self, agent: str) -> Any:
        return self.environment_controller.action.get(agent)

    def get_agent_state(self, agent: str) -> Any:
        return self.environment_controller.get_agent_state(agent).data
