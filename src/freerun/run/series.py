"""Several trainings, one after another with the same warm workers, and a table of results that a later call continues.

The settings of an environment declare such a series (`EnvSettings.series`): workflows of cyber defence, for example.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from freerun.adapters.env_adapter import SerialEnvs
from freerun.collecting.rollouts.evaluation_episodes import greedy, play
from freerun.core import EnvSettings, HeldOutSeed, Metrics, Policy, Purpose, UserError
from freerun.experiment import Result, run
from freerun.persistence import checkpoint, trust
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.files import read_json, write_json
from freerun.persistence.redaction import without_secrets
from freerun.run.pool import Pool
from freerun.settings import env_flags
from freerun.settings.config import AnyConfig
from freerun.settings.defaults import complete
from freerun.settings.factories import make_factory
from freerun.settings.named_code import code_in
from freerun.settings.registry import find_algorithm, find_mode, flatten_config
from freerun.telemetry.tracking import TrackingConfig

logger = logging.getLogger("freerun")

TABLE = "workflows.json"
"""The file of the table. Its name and its keys are those of the first series, workflows: old folders have them."""
TRIAL_EPISODES = 20
"""Episodes by which a trained policy is judged for the table."""
ABOUT_ONE_RUN = ("run_dir", "quiet", "watch", *(field.name for field in dataclasses.fields(TrackingConfig)))
"""Settings that may differ between two calls that continue the same table."""


class SeriesTable:
    """The table of results: one entry per training that came to its end."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], env_settings: EnvSettings, names: list[str]):
        self.path = folder / TABLE
        left_out = (*ABOUT_ONE_RUN, *env_settings.series_fields)
        self._settings = {name: value for name, value in settings.items() if name not in left_out}
        self._names = names
        self.entries: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            known = read_table(folder)
            # Through JSON and back, because a file has lists where settings have tuples.
            if _given(known["settings"]) != _given(json.loads(json.dumps(self._settings))):
                noun = env_settings.series_fields[0]
                raise UserError(f"{folder} holds {noun}s trained with other settings: name another --run-dir")
            self.entries = known["workflows"]
        self._write()

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Add the result of one training, and write the table."""
        self.entries[name] = entry
        self._write()

    def _write(self) -> None:
        content = {"settings": self._settings, "orders": self._names, "workflows": self.entries}
        try:
            write_json(self.path, content)
        except OSError as error:
            logger.warning("%s could not be written: %s", self.path, error.strerror)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what was not given: another version of freerun may not have the setting at all."""
    return {name: value for name, value in settings.items() if value not in env_flags.NOT_GIVEN}


def read_table(folder: Path) -> dict[str, Any]:
    """Read what a series was trained with, and how far it has come."""
    known = read_json(folder / TABLE)
    if not isinstance(known.get("settings"), dict) or not isinstance(known.get("workflows"), dict):
        raise UserError(f"{folder / TABLE} is not a table that freerun wrote")
    return known


def resumed_config(folder: Path) -> dict[str, Any]:
    """Return the settings of a series that was stopped or killed. It continues with what its table lacks."""
    known = read_table(folder)
    fields = env_flags.settings_class(known["settings"].get("env")).series_fields
    if not fields:
        raise UserError(f"{folder / TABLE} names no environment that can be trained as a series")
    return {**known["settings"], fields[0]: tuple(known.get("orders", ())), "run_dir": str(folder)}


def is_series(folder: Path) -> bool:
    return (folder / TABLE).is_file()


def run_series(config: AnyConfig) -> list[Result]:
    """Train everything that the table lacks. Ctrl-C ends the current training, and with it the series."""
    config = complete(config)
    trainings = config.env_settings.series()
    noun = config.env_settings.series_fields[0]
    folder = config.run_dir or Path("runs") / f"{noun}s-{config.mode}-{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    flat_config = without_secrets(flatten_config(config))
    # The folder of the series is signed too: --resume reads the names of code from its table.
    trust.sign(folder, code_in(flat_config))
    table = SeriesTable(folder, flat_config, config.env_settings, list(trainings))
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        pool: Pool | None = None
        if can_share_workers(config):
            pool = Pool(make_factory(config))
            stack.callback(pool.close)
        for number, (name, env_settings) in enumerate(trainings.items()):
            if name in table.entries:
                continue
            # A name such as a,b,c would be awkward as a folder.
            path, found = find_place(folder / f"{number:03}-{name.replace(',', '-')}")
            own = dataclasses.replace(config, env_settings=env_settings, run_dir=path)
            # Without shared workers each training has its own, and is the only one that they ever serve.
            result = run(own, pool, number if pool else 0, found)
            results.append(result)
            if result.summary["outcome"] != "finished":
                break  # without an entry in the table, so that a later call continues this training
            table.add(name, {"run": path.name, **figures_of(result), **judge(own, result.policy.actor)})
            if not config.quiet:
                console = Console(stderr=True)
                print_table(table.entries, own, console if console.is_terminal else Console(stderr=True, width=120))
    return results


def can_share_workers(config: AnyConfig) -> bool:
    """True if one training's workers can serve the next, because nothing of theirs is left over in between."""
    whole = find_mode(config.mode).traits.whole_episodes and not config.collector.segment_steps
    return whole and find_algorithm(config.algo).traits.on_policy


def find_place(path: Path) -> tuple[Path, Checkpoint | None]:
    """Find the folder of a training and its newest checkpoint. A folder that cannot be used gets another one beside."""
    attempt = path
    for number in itertools.count(2):
        # A training that was interrupted continues from its newest whole checkpoint.
        if checkpoint.names(attempt):
            with contextlib.suppress(UserError):
                return attempt, checkpoint.newest(attempt)
        if not attempt.exists():
            return attempt, None
        attempt = path.with_name(f"{path.name}-{number}")
    raise AssertionError


def figures_of(result: Result) -> dict[str, Any]:
    """Return what the table says about the training itself."""
    names = ("episodes", "mean_return", "wall_seconds", "episodes_per_second", "startup_seconds")
    return {name: result.summary[name] for name in names}


def judge(config: AnyConfig, actor: Policy, num_episodes: int = TRIAL_EPISODES) -> Metrics:
    """Play some episodes with the trained policy, and average what the environment's settings say of each."""
    env = make_factory(config).make_one()
    # Every training is judged by the same episodes, which none of them was trained on.
    seed = HeldOutSeed(config.seed, Purpose.EVALUATION)
    episodes = [
        config.env_settings.trial_figures(env.env, float(segment.reward.sum()))
        for segment in play(SerialEnvs([env]), greedy(actor), seed, num_episodes)
    ]
    env.close()
    return {name: sum(episode[name] for episode in episodes) / len(episodes) for name in episodes[0]}


def print_table(entries: Mapping[str, Mapping[str, Any]], config: AnyConfig, console: Console) -> None:
    """Print the results so far, one line per training."""
    noun = config.env_settings.series_fields[0]
    formats = {**config.env_settings.trial_columns, "episodes": "{:,}"}
    formats |= {"episodes_per_second": "{:.1f}", "startup_seconds": "{:.2f}"}
    titles = {"trial_return": "return", "episodes_per_second": "episodes/s", "startup_seconds": "start-up s"}
    table = Table(title=f"{noun.capitalize()}s", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(noun, no_wrap=True)
    for name in formats:
        table.add_column(titles.get(name, name), justify="right")
    for name, entry in entries.items():
        figures = [written.format(entry[figure]) for figure, written in formats.items()]
        table.add_row(name.replace(",", " › "), *figures)
    console.print(table)
