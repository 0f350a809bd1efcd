"""The settings of a federation. They are the flags of `freerun federate`, and a ServerApp's run config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from freerun.core import UserError, require_positive

Strategy = Literal["fedavg", "fedavgm", "fedprox", "fedadam", "fedmedian"]
Privacy = Literal["none", "central", "local"]
SendAs = Literal["exact", "float16"]
Share = Literal["all", "policy"]


@dataclass(frozen=True)
class FederationOptions:
    """How sites are put together."""

    rounds: int = 10
    """How often the sites exchange weights."""
    updates_per_round: int = 5
    """Updates that every site makes in a round."""
    strategy: Strategy = "fedavg"
    """How weights become one: their mean by steps (fedavg), a step of the server's own towards and beyond that mean
    (fedavgm), the mean with a term that keeps sites near each other (fedprox), an Adam of the server's own (fedadam),
    or the median of each weight, which a minority of sites that send nonsense cannot move (fedmedian)."""
    send_as: SendAs = "exact"
    """How weights travel between sites and server. float16 halves the bytes, and rounds every weight to 11 bits on its
    way; sites and server go on to compute in their own precision."""
    share: Share = "all"
    """What sites share: all that they learn, or the policy alone. Then every site keeps a value function of its own,
    which knows its environment, and sends fewer bytes."""
    proximal_mu: float = 0.01
    """The strength of FedProx's term."""
    server_learning_rate: float = 0.01
    """The learning rate of FedAdam."""
    server_step: float = 1.0
    """How far fedavgm goes: 1 to the mean of the sites, as fedavg, and 2 twice as far."""
    server_momentum: float = 0.0
    """The part of the last change of all weights that fedavgm adds to the next one."""
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
        # A run config of Flower holds any text. A misspelt --privacy must not mean that there is none.
        for name, choices in (("strategy", Strategy), ("privacy", Privacy), ("send_as", SendAs), ("share", Share)):
            if getattr(self, name) not in get_args(choices):
                flag, known = name.replace("_", "-"), ", ".join(get_args(choices))
                raise UserError(f"there is no --{flag} {getattr(self, name)}: use {known}")
        if self.privacy != "none" and self.send_as != "exact":
            # Flower's mods clip and add noise in the numbers that are sent, and float16 would round the noise away.
            raise UserError("--privacy needs exact weights: leave --send-as out")
        require_positive(self, "rounds", "updates_per_round", "min_sites")
        rates = ("server_learning_rate", "server_step", "clipping_norm", "epsilon", "delta")
        for name in (*rates, "round_timeout", "reach_timeout"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')} must be positive")
        if not 0 <= self.server_momentum < 1:
            raise UserError("--server-momentum must be at least 0 and below 1")
        if not (self.proximal_mu >= 0 and self.noise_multiplier >= 0):
            raise UserError("--proximal-mu and --noise-multiplier must not be negative")
