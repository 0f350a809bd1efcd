"""A site of a federation: an ordinary training that pauses after each round and goes on with the weights of all sites.

The process, the workers, the optimiser and the replay buffer stay between rounds. So a site whose weights come back
unchanged, because there is no other one, trains exactly as `freerun train` does.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from freerun.core import Algorithm, ProximalAlgorithm, StopRun, UserError, WarmStartable
from freerun.experiment import Result, run
from freerun.persistence.checkpoint import Checkpoint
from freerun.run.update_hooks import Update
from freerun.settings.config import AnyConfig
from freerun.settings.registry import find_algorithm
from freerun.tools.federation import shared_state, site_link
from freerun.tools.federation.shared_state import SharedState
from freerun.tools.federation.site_link import SiteMessage

logger = logging.getLogger("freerun")

THE_END = "the federation has ended"


@dataclass
class SiteRound:
    """A round that a site trains now."""

    connection: Connection
    """Whoever ordered the round waits here for the answer."""
    num_updates: int
    share: str
    """What the answer holds: the `Share` of the order."""
    first_step: int
    """The steps of the run when the round began."""
    updates_done: int = 0


class SiteExchange:
    """The `WeightExchange` of a site: it takes orders from a socket, between two updates and in the same thread."""

    def __init__(self, socket: Path, name: str, algo: str):
        self._name, self._algo = name, algo
        self._traits = find_algorithm(algo).traits
        self._socket = socket
        self._listener = site_link.listen(socket)
        self._round: SiteRound | None = None
        self._now: tuple[WarmStartable, int, float] | None = None
        self._has_ended = False

    def __call__(self, algorithm: Algorithm, steps: int, mean_return: float) -> None:
        site = shared_state.require_shareable(algorithm, self._algo)
        is_start, self._now = self._now is None, (site, steps, mean_return)
        if self._round is not None:
            self._round.updates_done += 1
            if self._round.updates_done < self._round.num_updates:
                return
            self._answer_round()
        while self._round is None and not self._has_ended:
            self._take_order(site, steps)
        if self._has_ended and is_start:
            raise StopRun(THE_END)

    def on_update(self, update: Update) -> None:
        """End the run once the federation has ended: after this update, with its checkpoint and its results."""
        if self._has_ended:
            update.stop(THE_END)

    def close(self, has_finished: bool) -> None:
        """Let nobody connect again. Answer a round that the end of the budget has cut short; a run that was interrupted
        or has failed may hold half of an update, which nobody gets."""
        if self._round is not None:
            if has_finished and self._round.updates_done:
                self._answer_round()
            else:
                _answer(self._round.connection, {"error": f"the run of {self._name} has ended"})
        self._listener.close()  # which removes the socket, too

    # ------------------------------------------------------------------------------------------ orders

    def _take_order(self, site: WarmStartable, steps: int) -> None:
        connection = self._listener.accept()
        try:
            order = site_link.receive(connection)
            self._obey(order, site, connection, steps)
        except UserError as error:  # an order that cannot be followed changes nothing here
            logger.warning("%s refuses an order: %s", self._name, error)
            _answer(connection, {"error": f"{self._name} refuses: {error}"})
        except (EOFError, ConnectionError):
            connection.close()  # whoever began the order is gone

    def _obey(self, order: SiteMessage, site: WarmStartable, connection: Connection, steps: int) -> None:
        kind, share = order.header.get("order"), str(order.header.get("share", "all"))
        mine = self._take(site, share)
        if kind == site_link.DESCRIBE:
            _answer(connection, self._header(0, 0, math.nan), mine)
            return
        if kind not in (site_link.TRAIN, site_link.FINISH):
            raise UserError(f"there is no order {kind!r}")
        shared = shared_state.fitted(order.shared, mine)
        if kind == site_link.FINISH:
            shared_state.load(site, shared)
            self._has_ended = True
            _answer(connection, self._header(0, 0, math.nan))
            return
        num_updates, proximal = order.header.get("updates"), order.header.get("proximal", 0.0)
        if not isinstance(num_updates, int) or num_updates < 1:
            raise UserError(f"a round has a whole number of updates, not {num_updates!r}")
        if proximal and not self._traits.has_proximal_term:
            raise UserError(f"--algo {self._algo} has no proximal term: use another strategy than FedProx")
        shared_state.load(site, shared)
        if self._traits.has_proximal_term:
            cast(ProximalAlgorithm, site).stay_near(float(proximal))
        self._round = SiteRound(connection, num_updates, share, steps)

    def _answer_round(self) -> None:
        assert self._round is not None
        assert self._now is not None
        done, self._round = self._round, None
        site, steps, mean_return = self._now
        header = self._header(steps - done.first_step, done.updates_done, mean_return)
        _answer(done.connection, header, self._take(site, done.share))

    def _take(self, site: WarmStartable, share: str) -> SharedState:
        shared = shared_state.take(site)
        if share == "all":
            return shared
        if share != "policy" or not self._traits.critic_parts:
            raise UserError(f"--algo {self._algo} cannot share {share!r} alone")
        return shared.without(self._traits.critic_parts)

    def _header(self, steps: int, updates: int, mean_return: float) -> dict[str, object]:
        # JSON has no NaN.
        known_return = mean_return if math.isfinite(mean_return) else None
        return {"site": self._name, "steps": steps, "updates": updates, "mean_return": known_return}


def _answer(connection: Connection, header: dict[str, object], shared: SharedState | None = None) -> None:
    with connection:
        try:
            site_link.send(connection, header, shared)
        except ConnectionError:
            logger.warning("nobody waits any longer for what this site has learned: it goes on with its next round")


def run_site(config: AnyConfig, socket: Path, name: str, resumed: Checkpoint | None = None) -> Result:
    """Train as a site that takes its orders from a socket, until the federation or the budget of the run ends."""
    exchange = SiteExchange(socket, name, config.algo)
    has_finished = False
    try:
        result = run(config, resumed=resumed, on_update=exchange.on_update, exchange=exchange)
        has_finished = result.summary["outcome"] == "finished"
        return result
    finally:
        exchange.close(has_finished)
