"""`freerun federate`."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from freerun.core import UserError
from freerun.settings.flag_parsing import parse, parse_known
from freerun.tools.cli import INTERRUPTED
from freerun.tools.federation.federation_options import FederationOptions

SITE = "--site"


@dataclass(frozen=True)
class _FederateFlags(FederationOptions):
    """The flags of this command, besides those of `freerun train`."""

    site: Annotated[str | None, tyro.conf.arg(metavar="NAME [FLAGS]")] = None
    """Train a site of this name here. Flags of `freerun train` that follow, up to the next --site, are its own."""
    listen: Annotated[Path | None, tyro.conf.arg(metavar="SOCKET")] = None
    """Be one site of a federation on several machines: take orders from the Flower SuperNode of this machine, whose
    node config names this socket."""
    name: str = "site"
    """The name of the site, with --listen."""


def federate(words: list[str]) -> int:
    """Train on several sites that share only weights, by way of Flower."""
    if {"-h", "--help"} & set(words):
        about = f"{federate.__doc__} Flags of `freerun train` before the first --site hold for all (docs/federated.md)."
        parse(_FederateFlags, ["--help"], prog="freerun federate ENV", description=about)
    common, sites = split_sites(words)
    flags, rest = parse_known(_FederateFlags, common)
    # SIGTERM ends a federation as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if flags.listen is not None:
        if sites:
            raise UserError("--listen is for a single site of a federation: leave --site out")
        return _be_a_site(flags, rest)
    from freerun.tools.federation import federation

    options = FederationOptions(
        **{field.name: getattr(flags, field.name) for field in dataclasses.fields(FederationOptions)}
    )
    configs = {name: _site_config(rest, own, number) for number, (name, own) in enumerate(sites.items())}
    folder = next(iter(configs.values())).run_dir if configs else None
    folder = folder or Path("runs") / f"federation-{datetime.now():%Y%m%d-%H%M%S}"
    is_quiet = all(config.quiet for config in configs.values())
    report = _print_round if not is_quiet else lambda figures: None
    result = federation.federate(configs, options, folder, report)
    for name, run_dir in result.run_dirs.items():
        print(f"{name}: {run_dir}  (freerun eval {run_dir})")
    print(f"Federation folder: {result.folder} (federation.jsonl, global.safetensors, sites/)")
    return 0


def split_sites(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split the words at each --site NAME: those before the first one are for all sites."""
    common: list[str] = []
    sites: dict[str, list[str]] = {}
    own = common
    left = list(words)
    while left:
        word = left.pop(0)
        if word != SITE:
            own.append(word)
            continue
        if not left or left[0].startswith("-"):
            raise UserError("--site needs a name: --site NAME, and the flags that this site alone has")
        name = left.pop(0)
        if name in sites:
            raise UserError(f"--site {name} is given twice: give every site a name of its own")
        if Path(name).name != name:
            raise UserError(f"--site {name} cannot be the name of a folder")
        own = sites[name] = []
    return common, sites


def _site_config(common: Sequence[str], own: Sequence[str], number: int) -> Any:
    from freerun.tools.cli.train_flags import Flags
    from freerun.tools.probe.device_choice import choose_device

    flags = Flags.read([*common, *own], None)
    if flags.resumes or flags.is_open:
        raise UserError("sites of a federation need a mode and a number of workers, and cannot be resumed together")
    if any(word.partition("=")[0] in ("--run-dir", "--run_dir") for word in own):
        raise UserError("--run-dir is the folder of the whole federation: give it before the first --site")
    config = choose_device(flags.config(prog="freerun federate"))
    # Sites with the same environment would otherwise play the same episodes.
    is_seeded = any(word.partition("=")[0] == "--seed" for word in own)
    return config if is_seeded else dataclasses.replace(config, seed=config.seed + number)


def _be_a_site(flags: _FederateFlags, words: Sequence[str]) -> int:
    from freerun.tools.cli.train_flags import Flags
    from freerun.tools.federation.site_training import run_site
    from freerun.tools.probe.device_choice import choose_device

    train = Flags.read(words, None)
    config = train.config(prog="freerun federate")
    config = config if train.resumed is not None else choose_device(config)
    assert flags.listen is not None
    result = run_site(config, flags.listen, flags.name, train.resumed)
    print(f"Run folder: {result.run_dir}  (freerun eval {result.run_dir})")
    return INTERRUPTED if result.summary["outcome"] == "interrupted" else 0


def _print_round(figures: dict[str, Any]) -> None:
    returns = ", ".join(
        f"{name} {'–' if site['mean_return'] is None else format(site['mean_return'], '.2f')}"
        for name, site in figures["sites"].items()
    )
    refused = "".join(f"; without {name}: {reason}" for name, reason in figures["refused"].items())
    megabytes = (figures["bytes_up"] + figures["bytes_down"]) / 1e6
    line = f"round {figures['round']}: {returns} ({megabytes:.2f} MB, {figures['seconds']:.1f} s){refused}"
    print(line, file=sys.stderr, flush=True)
