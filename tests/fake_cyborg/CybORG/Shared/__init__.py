"""What travels between the simulation and its agents."""

from typing import Any


class Observation:
    def __init__(self, success: bool = True):
        self.data: dict[str, Any] = {"success": success}

    def filter_addresses(self, ips: Any, cidrs: Any, include_localhost: bool) -> None:
        known = {str(address) for address in ips}
        for host in self.data.values():
            if isinstance(host, dict) and "Processes" in host:
                host["Processes"] = [it for it in host["Processes"] if str(it.get("address", "")) in known | {""}]


class Results:
    def __init__(self, observation: Any, reward: float = 0.0, done: bool = False):
        self.observation, self.reward, self.done = observation, reward, done
