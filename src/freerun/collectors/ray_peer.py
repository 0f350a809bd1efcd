"""A Ray actor as the learner sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray.actor import ActorHandle

from freerun.collectors.ray_actor import Hello


@dataclass(eq=False)
class Peer:
    """What it holds, and how far it has come."""

    index: int
    handle: ActorHandle
    room: int
    """Units that it may hold at once."""
    key: str
    """Where it shows signs of life."""
    hello: Hello | None = None
    """It is ready."""
    publication: int = 0
    """The newest that it has been told of."""
    num_calls: int = 0
    units: list[int] = field(default_factory=list)
    """Granted to it and not back yet."""
    owed: list[int] = field(default_factory=list)
    """Lost with the actor that it replaces, and for nobody else to run."""
    bound_for: str | None = None
    """The node that it is to move to, once it has finished what it holds."""

    @property
    def state(self) -> str:
        """Only one that is busy must show signs of life."""
        if self.hello is None:
            return "starting"
        return "busy" if self.units else "waiting"
