"""Flower's ClientApp of a site. It passes orders on to the site's own process, which outlives it.

Flower starts ClientApps anew for every message, or runs them in any of several processes. A training cannot live there:
it would lose its optimiser, its replay buffer and its workers. So the site listens at a socket of its machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod

from freerun.core import UserError
from freerun.tools.federation import flower_records as records
from freerun.tools.federation.federation_options import FederationOptions
from freerun.tools.federation.server_app import options_of
from freerun.tools.federation.shared_state import SharedState
from freerun.tools.federation.site_link import SiteLink, SiteMessage

SOCKET_SETTING = "site-socket"
"""The entry of a SuperNode's --node-config that names the socket at which its site listens."""
PARTITION = "partition-id"
"""The number of a node in Flower's simulation."""


def make_client_app(sockets: tuple[Path, ...] | None = None, options: FederationOptions | None = None) -> Any:
    """Return a ClientApp. In a simulation, the k-th node passes on to the k-th of the `sockets`; a SuperNode has its
    own in its node config. The options of a simulation are known; otherwise they are the run config."""
    app = ClientApp()

    def link_of(context: Context) -> tuple[SiteLink, FederationOptions]:
        known = options or options_of(context.run_config)
        if sockets is not None:
            socket = sockets[int(context.node_config[PARTITION])]
        elif SOCKET_SETTING in context.node_config:
            socket = Path(str(context.node_config[SOCKET_SETTING]))
        else:
            raise UserError(f"the SuperNode has no {SOCKET_SETTING} in its --node-config")
        return SiteLink(socket, known.reach_timeout, known.round_timeout, known.share), known

    def describe(message: Message, context: Context) -> Message:
        link, known = link_of(context)
        return _reply(message, link.describe(), known)

    def train(message: Message, context: Context) -> Message:
        link, known = link_of(context)

        def train_here(message: Message, context: Context) -> Message:
            config = message.content[records.CONFIG]
            shared = records.read_shared(message.content, records.CONFIG)
            answer = link.train(shared, int(config[records.UPDATES]), float(config.get("proximal-mu", 0.0)))
            if known.privacy != "none" and answer.shared.has_statistics:
                raise UserError(
                    "the moments of normalisers would leave the site without noise: with --privacy, give "
                    "--no-normalize-obs and --no-normalize-reward"
                )
            return _reply(message, answer, known, list(message.content[records.ARRAYS]))

        return _with_privacy(known, train_here)(message, context)

    def finish(message: Message, context: Context) -> Message:
        link, known = link_of(context)
        return _reply(message, link.finish(records.read_shared(message.content, records.CONFIG)), known)

    app.query()(describe)
    app.train()(train)
    app.train("finish")(finish)
    return app


def _with_privacy(options: FederationOptions, call: Callable[..., Message]) -> Callable[..., Message]:
    """Put one of Flower's mods around a handler: what leaves the site has passed through it."""
    mods: dict[str, Any] = {
        "central": fixedclipping_mod,
        "local": LocalDpMod(options.clipping_norm, options.clipping_norm, options.epsilon, options.delta),
    }
    mod = mods.get(options.privacy)
    return call if mod is None else lambda message, context: mod(message, context, call)


def _reply(
    message: Message, answer: SiteMessage, options: FederationOptions, order: list[str] | None = None
) -> Message:
    header, shared = answer
    mean_return = header["mean_return"]
    metrics = {
        records.STEPS: int(header["steps"]),
        records.RETURN: math.nan if mean_return is None else float(mean_return),
    }
    # Names that differ are the server's to refuse.
    has_same_names = order is not None and shared.weights.keys() == set(order)
    site = {records.NAME: str(header["site"]), records.MOMENTS: SharedState({}, shared.moments).packed_moments()}
    content = RecordDict(
        {
            records.ARRAYS: records.to_arrays(shared.weights, options.send_as, order if has_same_names else None),
            records.METRICS: MetricRecord(metrics),
            records.SITE: ConfigRecord(site),
        }
    )
    return Message(content, reply_to=message)


app = make_client_app()
"""For a Flower App's pyproject.toml: clientapp = "freerun.tools.federation.client_app:app"."""
