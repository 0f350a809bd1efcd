"""The settings of a federation. They are the flags of `freerun federate`, and a ServerApp's run config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freerun.core import UserError, require_positive

Strategy = Literal["fedavg", "fedprox", "fedadam", "fedmedian"]
Privacy = Literal["none", "central", "local"]


@dataclass(frozen=True)
class FederationOptions:
    """How sites are put together."""

    rounds: int = 10
    """How often the sites exchange weights."""
    updates_per_round: int = 5
    """Updates that every site makes in a round."""
    strategy: Strategy = "fedavg"
    """How weights become one: their mean by steps (fedavg), the same with a term that keeps sites near each other
    (fedprox), an Adam of the server's own (fedadam), or the median of each weight, which a minority of sites that send
    nonsense cannot move (fedmedian)."""
    proximal_mu: float = 0.01
    """The strength of FedProx's term."""
    server_learning_rate: float = 0.01
    """The learning rate of FedAdam."""
    min_sites: int | None = None
    """Begin a round as soon as this many sites are connected (all of a local federation, if not given; otherwise 2)."""
    round_timeout: float = 3600.0
    """Go on without sites that have not answered within so many seconds."""
    reach_timeout: float = 120.0
    """Wait so many seconds in a round for a site that is not there: it may come back."""
    privacy: Privacy = "none"
    """Differential privacy by Flower's own mods: sites clip what they send and the server adds noise (central), or
    sites clip and add noise themselves (local)."""
    clipping_norm: float = 1.0
    """The largest norm of what a site may change in a round, with --privacy."""
    noise_multiplier: float = 0.1
    """The noise of --privacy central, in clipping norms."""
    epsilon: float = 10.0
    """The privacy budget of a round, with --privacy local."""
    delta: float = 1e-5
    """The probability that --privacy local fails."""

    def __post_init__(self) -> None:
        require_positive(self, "rounds", "updates_per_round", "min_sites")
        positive = ("server_learning_rate", "round_timeout", "reach_timeout", "clipping_norm", "epsilon", "delta")
        for name in positive:
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')} must be positive")
        if not (self.proximal_mu >= 0 and self.noise_multiplier >= 0):
            raise UserError("--proximal-mu and --noise-multiplier must not be negative")
