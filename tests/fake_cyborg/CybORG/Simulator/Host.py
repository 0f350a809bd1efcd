"""One host."""

from copy import deepcopy
from typing import Any

SERVICE = "OTService"


class Process:
    def __init__(self, name: str, address: Any = None):
        self.name, self.address = name, address


class Host:
    def __init__(self, address: Any, has_service: bool):
        self.os_type = "LINUX"
        self.address, self.has_service, self.decoys = address, has_service, 0.0
        self.processes = [Process("sshd", address), Process("hidden", "127.0.0.1")]
        self.sessions: dict[str, list[int]] = {"Red": []}
        self.files: list[Any] = []
        self.events: list[Any] = []
        self.start_service()
        self.backup = deepcopy(self.files)

    def create_backup(self) -> None:
        self.backup = list(self.files)

    def restore(self) -> None:
        self.files = list(self.backup)
        self.start_service()

    def stop_service(self) -> None:
        self.processes = [process for process in self.processes if process.name != SERVICE]

    def start_service(self) -> None:
        self.stop_service()
        self.processes += [Process(SERVICE)] * self.has_service
