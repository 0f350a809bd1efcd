"""Many workflows, trained one after another by the same warm workers, with a table that a later call continues."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from freerun.collectors.trials import TRIAL_SEED, Greedy, play
from freerun.completing import complete
from freerun.config import TrainConfig
from freerun.core import UserError
from freerun.envs.lane import Lanes
from freerun.envs.workflow import WorkflowEnv, read_order
from freerun.experiment import Result, run
from freerun.making import make_factory
from freerun.persistence import checkpoint, origin
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.files import read_json, write_atomically
from freerun.persistence.secrecy import without_secrets
from freerun.pool import Pool
from freerun.registry import MODES, flatten_config, lookup
from freerun.telemetry.tracking import TrackingConfig

logger = logging.getLogger("freerun")

TABLE = "workflows.json"
TRIAL_EPISODES = 20
ABOUT_ONE_RUN = (
    "run_dir",
    "workflow",
    "workflows",
    "quiet",
    "watch",
    *(field.name for field in dataclasses.fields(TrackingConfig)),
)


class Workflows:
    """The table of results: one entry per workflow that was trained to its end."""

    def __init__(self, folder: Path, settings: dict[str, Any], orders: list[str]):
        self.path = folder / TABLE
        self._settings = {name: value for name, value in settings.items() if name not in ABOUT_ONE_RUN}
        self._orders = orders
        self.entries: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            known = read_table(folder)
            if known["settings"] != json.loads(json.dumps(self._settings)):
                raise UserError(f"{folder} holds workflows trained with other settings: name another --run-dir")
            self.entries = known["workflows"]
        self._write()

    def add(self, order: str, entry: dict[str, Any]) -> None:
        self.entries[order] = entry
        self._write()

    def _write(self) -> None:
        content = {"settings": self._settings, "orders": self._orders, "workflows": self.entries}
        try:
            write_atomically(self.path, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            logger.warning("%s could not be written: %s", self.path, error.strerror)


def read_table(folder: Path) -> dict[str, Any]:
    """What a series was trained with, and how far it has come."""
    known = read_json(folder / TABLE)
    if not isinstance(known.get("settings"), dict) or not isinstance(known.get("workflows"), dict):
        raise UserError(f"{folder / TABLE} is not a table that freerun wrote")
    return known


def resumed_config(folder: Path) -> dict[str, Any]:
    """The settings of a series that was stopped or killed: it goes on with the workflows that its table lacks."""
    known = read_table(folder)
    return {**known["settings"], "workflow": tuple(known.get("orders", ())), "run_dir": str(folder)}


def is_series(folder: Path) -> bool:
    return (folder / TABLE).is_file()


def run_workflows(config: TrainConfig[Any, Any]) -> list[Result]:
    """Train every workflow that the table lacks. Ctrl-C ends the one under way, and with it the series."""
    config = complete(config)
    orders = [",".join(read_order(order)) for order in config.cyber.orders()]
    folder = config.run_dir or Path("runs") / f"workflows-{config.mode}-{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    flat_config = without_secrets(flatten_config(config))
    origin.sign(folder, flat_config)
    table = Workflows(folder, flat_config, orders)
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        pool: Pool | None = None
        if _can_go_on(config):
            pool = Pool(make_factory(config))
            stack.callback(pool.close)
        for series, order in enumerate(orders):
            if order in table.entries:
                continue
            path, found = _place(folder / f"{series:03}-{order.replace(',', '-')}")
            cyber = dataclasses.replace(config.cyber, workflow=(order,), workflows=None)
            own = dataclasses.replace(config, cyber=cyber, run_dir=path)
            result = run(own, pool, series if pool else 0, found)
            results.append(result)
            if result.summary["outcome"] != "finished":
                break
            table.add(order, {"run": path.name, **_figures(result), **_tried(config, cyber, result)})
            if not config.quiet:
                console = Console(stderr=True)
                print_table(table.entries, console if console.is_terminal else Console(stderr=True, width=120))
    return results


def _can_go_on(config: TrainConfig[Any, Any]) -> bool:
    """Whether one training's workers can serve the next: where they hand over whole episodes."""
    whole = lookup("mode", config.mode, MODES).whole_episodes
    return whole and getattr(config.collector, "segment_steps", None) is None and config.algo == "ppo"


def _place(path: Path) -> tuple[Path, Checkpoint | None]:
    """Where the training of a workflow goes on, or begins: in a folder of its own beside one that cannot be used."""
    attempt = path
    for number in itertools.count(2):
        if checkpoint.names(attempt):
            with contextlib.suppress(UserError):
                return attempt, checkpoint.newest(attempt)
        if not attempt.exists():
            return attempt, None
        attempt = path.with_name(f"{path.name}-{number}")
    raise AssertionError


def _figures(result: Result) -> dict[str, Any]:
    names = ("episodes", "mean_return", "wall_seconds", "episodes_per_second", "startup_seconds")
    return {name: result.summary[name] for name in names}


def _tried(config: TrainConfig[Any, Any], cyber: Any, result: Result) -> dict[str, float]:
    """The policy's own worth: return without the shaping, and how far it keeps to the order."""
    lane = make_factory(dataclasses.replace(config, cyber=cyber)).make_lane()
    assert isinstance(lane.env, WorkflowEnv)
    returns, shares = [], []
    for segment in play(Lanes([lane]), Greedy(result.policy), TRIAL_SEED + config.seed, TRIAL_EPISODES):
        share = lane.env.compliance.share
        shares.append(share)
        returns.append(float(segment.reward.sum()) - lane.env.weight * (share - 1))  # shaping adds up to its end
    lane.close()
    return {"trial_return": sum(returns) / len(returns), "compliance": sum(shares) / len(shares)}


def print_table(entries: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title="Workflows", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("workflow", no_wrap=True)
    for name in ("return", "compliance", "episodes", "episodes/s", "start-up s"):
        table.add_column(name, justify="right")
    for order, entry in entries.items():
        table.add_row(
            order.replace(",", " › "),
            f"{entry['trial_return']:.1f}",
            f"{entry['compliance']:.0%}",
            f"{entry['episodes']:,}",
            f"{entry['episodes_per_second']:.1f}",
            f"{entry['startup_seconds']:.2f}",
        )
    console.print(table)
