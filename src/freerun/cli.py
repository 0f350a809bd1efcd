"""The command line: `freerun train | probe | eval | replay | bench | watch | plot | list | check-env`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from freerun.commands import INTERRUPTED
from freerun.commands.bench import bench
from freerun.commands.check_env import check_env
from freerun.commands.evaluate import evaluate
from freerun.commands.list_names import list_names
from freerun.commands.plot import plot
from freerun.commands.probe import probe
from freerun.commands.replay import replay
from freerun.commands.train import train
from freerun.commands.watch import watch
from freerun.core import EnvFailure, LearnerFailure, UserError

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "probe": probe,
    "eval": evaluate,
    "replay": replay,
    "bench": bench,
    "watch": watch,
    "plot": plot,
    "list": list_names,
    "check-env": check_env,
}
UNREAD = 128 + signal.SIGPIPE
"""The exit code where whoever read the output has gone, as with `| head`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a failure of the environment or of another learner, 2 bad input, 130 interrupted,
    141 unread."""
    try:
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print is for nobody
        return UNREAD


def _is_unread(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _main(words: list[str]) -> int:
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # YOUR_MODULE:YourEnv may lie here, as it may for `python -m freerun`
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return 0 if words else 2
    if words[0] == "--version":
        from freerun import __version__

        print(__version__)
        return 0
    exit_code = _run(words)
    if launcher := sys.modules.get("freerun.envs.isaac_launch"):
        launcher.stop(exit_code)
    return exit_code


def _run(words: list[str]) -> int:
    try:
        if words[0] not in COMMANDS:
            raise UserError(f"there is no command {words[0]!r}: use {', '.join(COMMANDS)}")
        return COMMANDS[words[0]](words[1:])
    except UserError as error:
        print(f"freerun: {error}", file=sys.stderr)
        return 2
    except (EnvFailure, LearnerFailure) as failure:
        print(f"freerun: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_help() -> None:
    console = Console()
    console.print("[bold]freerun[/bold] trains agents without making fast workers wait for slow ones.\n")
    table = Table.grid(padding=(0, 3))
    for name, command in COMMANDS.items():
        table.add_row(f"  freerun {name}", (command.__doc__ or "").splitlines()[0])
    console.print(table)
    console.print("\nStart with: [cyan]freerun train CartPole-v1[/cyan]. Each command explains itself with --help.")
