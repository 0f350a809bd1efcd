"""`freerun watch`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from freerun.core import UserError
from freerun.settings.flag_parsing import parse


@dataclass(frozen=True)
class _WatchFlags:
    paths: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN_DIR")]] = (Path("runs"),)
    """Runs, or folders of runs. The page shows nothing else of this machine."""
    host: str = "127.0.0.1"
    """The address to listen on. Other machines can reach only one that is not a loopback address; that needs a
    --token."""
    port: int | None = None
    """The port to listen on (8642 if not given, or another if that is taken)."""
    token: str | None = None
    """A secret that the address of the page must contain (a new one each time if not given). FREERUN_WATCH_TOKEN sets
    it too, and other users cannot see it in the list of processes."""
    selected: str | None = None
    """The run to show first (the newest if not given)."""
    until_input_ends: bool = False
    """End when standard input ends: for programs that start this one."""


def watch(words: list[str]) -> int:
    """Show runs on a local web page, live or afterwards."""
    options = parse(_WatchFlags, words, prog="freerun watch", description=watch.__doc__)
    from freerun.tools.watch.server import end_with_input, serve

    for path in options.paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}: name a run folder, or a folder of runs")
    if options.until_input_ends:
        end_with_input()
    token = options.token or os.environ.get("FREERUN_WATCH_TOKEN")
    serve(options.paths, options.host, options.port, token, options.selected, lambda url: print(url, flush=True))
    return 0
