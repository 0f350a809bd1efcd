"""Red."""

import random
from typing import Any

from CybORG.Shared.Actions import Attack, Sleep


class SleepAgent:
    def end_episode(self) -> None:
        pass

    def get_action(self, hosts: list[str]) -> Any:
        return Sleep()


class B_lineAgent(SleepAgent):
    """Up through the list of hosts, and down again."""

    def __init__(self) -> None:
        self.end_episode()

    def end_episode(self) -> None:
        self.place = 0

    def get_action(self, hosts: list[str]) -> Any:
        self.place += random.random() < 0.3
        return Attack(hosts[-1 - self.place % len(hosts)])


class RedMeanderAgent(SleepAgent):
    def get_action(self, hosts: list[str]) -> Any:
        return Attack(random.choice(hosts))
