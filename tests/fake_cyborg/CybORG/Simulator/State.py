"""The network as it is."""

from ipaddress import IPv4Network
from random import choice, sample
from typing import Any

from CybORG.Shared import Observation
from CybORG.Simulator.Host import Host


class Session:
    def __init__(self, host: str, username: str):
        self.host, self.username = host, username


class State:
    def __init__(self, scenario: Any):
        self.scenario = scenario
        self.reset()

    def reset(self) -> None:
        subnets = self.scenario.parsed["Subnets"]
        cidrs = sample(list(IPv4Network("10.0.0.0/16").subnets(new_prefix=28)), len(subnets))
        self.subnet_name_to_cidr = dict(zip(subnets, cidrs, strict=True))
        self.hosts: dict[str, Host] = {}
        self.ip_addresses: dict[Any, str] = {}
        self.sessions: dict[str, dict[int, Session]] = {"Red": {}}
        self.num_sessions = 0
        for name, cidr in self.subnet_name_to_cidr.items():
            for host in subnets[name]:
                address = choice([it for it in cidr.hosts() if it not in self.ip_addresses])
                self.ip_addresses[address] = host
                self.hosts[host] = Host(address, host in self.scenario.parsed["Services"])
                self.hosts[host].create_backup()
        self.enter("User0")

    def access(self, host: str) -> Session | None:
        return next((session for session in self.sessions["Red"].values() if session.host == host), None)

    def enter(self, host: str) -> None:
        self.sessions["Red"][self.num_sessions] = Session(host, "user")
        self.hosts[host].sessions["Red"].append(self.num_sessions)
        self.num_sessions += 1

    def expel(self, host: str, usernames: set[str]) -> bool:
        sessions = self.sessions["Red"]
        gone = [it for it in self.hosts[host].sessions["Red"] if sessions[it].username in usernames]
        for number in gone:
            self.hosts[host].sessions["Red"].remove(number)
            del sessions[number]
        return bool(gone)

    def get_true_state(self, info: dict[str, Any]) -> Observation:
        truth = Observation()
        for name in info:
            host, data = self.hosts[name], truth.data.setdefault(name, {})
            if "Processes" in info[name]:
                data["Processes"] = [{"Process Name": it.name, "address": it.address or ""} for it in host.processes]
            if "Sessions" in info[name]:
                sessions = self.sessions["Red"]
                data["Sessions"] = [{"Agent": "Red", "Username": sessions[it].username} for it in host.sessions["Red"]]
            if "System info" in info[name]:
                data["System info"] = {"Hostname": name, "OSType": host.os_type}
        return truth
