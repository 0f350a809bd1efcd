"""Flower's ServerApp: it has sites train in rounds, puts what they have learned together, and writes it down."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.numpy
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from freerun.core import LearnerFailure, UserError
from freerun.tools.federation import flower_records as records
from freerun.tools.federation import shared_state
from freerun.tools.federation.federation_options import FederationOptions
from freerun.tools.federation.shared_state import SharedState
from freerun.tools.federation.site_strategy import SiteStrategy, make_strategy

ROUNDS, WEIGHTS = "federation.jsonl", "global.safetensors"
"""A line for every round; and what all sites have learned together, by name."""
FINISH = f"{MessageType.TRAIN}.finish"
DEFAULT_MIN_SITES = 2
FOLDER_SETTING = "folder"
"""The entry of the run config that says where the ServerApp writes."""
POLL_SECONDS = 0.5
OnRound = Callable[[dict[str, Any]], None]
"""Takes the figures of a round."""


def options_of(run_config: Mapping[str, Any]) -> FederationOptions:
    """Read options from a Flower run config, where they have the names of the flags."""
    names = {field.name for field in dataclasses.fields(FederationOptions)}
    given = {name.replace("-", "_"): value for name, value in run_config.items() if name != FOLDER_SETTING}
    if unknown := sorted(given.keys() - names):
        raise UserError(f"the run config has an unknown entry {unknown[0]!r}")
    return FederationOptions(**given)


def make_server_app(
    options: FederationOptions | None = None, folder: Path | None = None, on_round: OnRound = lambda figures: None
) -> Any:
    """Return a ServerApp. Without options and a folder, both come from the run config."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        where = folder or Path(str(config.get(FOLDER_SETTING, "federation")))
        run_rounds(grid, options or options_of(config), where, on_round)

    app.main()(main)
    return app


def run_rounds(grid: Grid, options: FederationOptions, folder: Path, on_round: OnRound) -> SharedState:
    """Run all rounds of a federation, end the training of its sites, and return what they have learned together."""
    folder.mkdir(parents=True, exist_ok=True)
    num_sites = options.min_sites or DEFAULT_MIN_SITES
    start = _first_state(grid, num_sites, options.round_timeout)
    strategy = SiteStrategy(make_strategy(options, num_sites), start, options, _writer(folder, on_round))
    strategy.start(grid, records.to_arrays(start.weights), num_rounds=options.rounds, timeout=options.round_timeout)
    moments = strategy.shared.packed_moments()
    content = RecordDict(
        {
            records.ARRAYS: records.to_arrays(strategy.shared.weights, options.send_as),
            records.CONFIG: ConfigRecord({records.MOMENTS: moments}),
        }
    )
    _ask_all(grid, content, FINISH, options.reach_timeout)
    return strategy.shared


def _first_state(grid: Grid, num_sites: int, timeout: float) -> SharedState:
    """Return what all sites begin with: the fresh networks of one of them, which a minority of the sites cannot choose.

    If sites differ in the shapes of their networks, the shapes of most of them count.
    """
    deadline = time.monotonic() + timeout
    while len(list(grid.get_node_ids())) < num_sites:
        if time.monotonic() > deadline:
            raise LearnerFailure(f"fewer than {num_sites} sites have connected within {timeout:g} s")
        time.sleep(POLL_SECONDS)
    found: list[tuple[str, SharedState]] = []
    reasons = []
    for reply in _ask_all(grid, RecordDict(), MessageType.QUERY, timeout):
        try:
            if reply.has_error():
                raise UserError(str(reply.error.reason))
            shared = records.read_shared(reply.content, records.SITE)
            found.append((str(reply.content[records.SITE][records.NAME]), shared_state.fitted(shared, shared)))
        except (UserError, *records.UNREADABLE) as error:
            reasons.append(str(error))
    if not found:
        raise LearnerFailure(f"no site says what its networks are like: {'; '.join(reasons) or 'none answered'}")
    # By name: the order in which sites answer must not decide between two that are equally usual.
    return shared_state.most_usual([shared for _, shared in sorted(found, key=lambda pair: pair[0])])


def _ask_all(grid: Grid, content: RecordDict, message_type: str, timeout: float) -> list[Message]:
    nodes = sorted(grid.get_node_ids())
    messages = [Message(content, dst_node_id=node, message_type=message_type) for node in nodes]
    return list(grid.send_and_receive(messages, timeout=timeout))


def _writer(folder: Path, on_round: OnRound) -> Callable[[dict[str, Any], SharedState], None]:
    def write(figures: dict[str, Any], shared: SharedState) -> None:
        # First the weights, in one move: whoever reads a line of the table finds what it tells of.
        temporary = folder / f".{WEIGHTS}"
        temporary.write_bytes(safetensors.numpy.save(shared.weights))
        temporary.replace(folder / WEIGHTS)
        with (folder / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
        on_round(figures)

    return write


app = make_server_app()
"""For a Flower App's pyproject.toml: serverapp = "freerun.tools.federation.server_app:app"."""
