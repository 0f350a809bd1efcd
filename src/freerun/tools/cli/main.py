"""The command line: `freerun train | sweep | search-workflows | federate | probe | eval | export | replay | bench |
watch | plot | list | check-env`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from freerun.core import CallbackFailure, EnvFailure, LearnerFailure, UserError
from freerun.tools.cli import INTERRUPTED
from freerun.tools.cli.bench_command import bench
from freerun.tools.cli.check_env_command import check_env
from freerun.tools.cli.eval_command import evaluate
from freerun.tools.cli.export_command import export
from freerun.tools.cli.federate_command import federate
from freerun.tools.cli.list_command import list_names
from freerun.tools.cli.plot_command import plot
from freerun.tools.cli.probe_command import probe
from freerun.tools.cli.replay_command import replay
from freerun.tools.cli.search_workflows_command import search_workflows
from freerun.tools.cli.sweep_command import sweep
from freerun.tools.cli.train_command import train
from freerun.tools.cli.watch_command import watch

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "sweep": sweep,
    "probe": probe,
    "eval": evaluate,
    "export": export,
    "replay": replay,
    "bench": bench,
    "watch": watch,
    "plot": plot,
    "list": list_names,
    "check-env": check_env,
    "search-workflows": search_workflows,
    "federate": federate,
}
UNREAD = 128 + signal.SIGPIPE
"""The exit code if the reader of the output is gone, as with `| head`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 done, 1 a failure of the environment, of a callback or of another learner, 2 bad input, 130 interrupted, 141
    nobody reads.
    """
    try:
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()  # here, because Python would report a broken pipe at its exit in its own words
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads what is left to print
        return UNREAD


def _is_unread(stream: TextIO) -> bool:
    """True if the other end of a pipe is closed. A broken pipe elsewhere, to a worker say, is a real error."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _main(words: list[str]) -> int:
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # your_module:YourEnv may lie here, as for `python -m freerun`
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return 0 if words else 2
    if words[0] == "--version":
        from freerun import __version__

        print(__version__)
        return 0
    exit_code = _run(words)
    # Isaac Sim ends the process itself. Its module is loaded only if a command needed it.
    if launcher := sys.modules.get("freerun.adapters.isaac_launch"):
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
    except (EnvFailure, LearnerFailure, CallbackFailure) as failure:
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
