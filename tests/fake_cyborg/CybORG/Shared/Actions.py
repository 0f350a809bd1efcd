"""Blue's and red's moves."""

import random
from typing import Any

from CybORG.Shared import Observation


class Sleep:
    cost = 0.0

    def get_params(self) -> dict[str, Any]:
        return dict(vars(self))

    def sim_execute(self, state: Any) -> Observation:
        return Observation()


class Monitor(Sleep):
    """Blue is told of every event since the last time, by a process that was not there before."""

    def sim_execute(self, state: Any) -> Observation:
        told = Observation()
        for name, host in state.hosts.items():
            if host.events:
                told.data[name] = {"Processes": host.events}
                host.events = []
        return told


class OnHost(Sleep):
    def __init__(self, hostname: str):
        self.hostname = hostname


class Analyse(OnHost):
    def sim_execute(self, state: Any) -> Observation:
        seen = Observation()
        seen.data[self.hostname] = {"Files": list(state.hosts[self.hostname].files)}
        return seen


class Remove(OnHost):
    def sim_execute(self, state: Any) -> Observation:
        return Observation(state.expel(self.hostname, {"user"}))


class Restore(OnHost):
    cost = -1.0

    def sim_execute(self, state: Any) -> Observation:
        state.hosts[self.hostname].restore()
        return Observation(state.expel(self.hostname, {"user", "root"}))


class Decoy(OnHost):
    def sim_execute(self, state: Any) -> Observation:
        state.hosts[self.hostname].decoys += random.random()
        return Observation()


DECOYS = [type(f"Decoy{number}", (Decoy,), {}) for number in range(8)]


class Attack(OnHost):
    """A scan, then a user's access, then all privileges, then an end to the service."""

    def sim_execute(self, state: Any) -> Observation:
        host = state.hosts[self.hostname]
        if random.random() < 0.2 + min(host.decoys / 10, 0.5):
            return Observation(False)
        access = state.access(self.hostname)
        if access is None:
            host.events.append({"Connections": [{"local_port": 22, "remote_port": random.choice([4444, 50000])}]})
            state.enter(self.hostname)
        elif access.username != "root":
            access.username = "root"
            host.files.append({"Density": 0.9 if random.random() < 0.9 else 0.1})
        else:
            host.stop_service()
        return Observation()
