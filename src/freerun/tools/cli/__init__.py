"""One module per command: its flags, and what it prints. Slow imports happen inside the commands, so --help is
quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM."""
RunDir = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
Trusted = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        help="Allow code that a folder from elsewhere names as module:callable (the flag may be given again)."
    ),
]


def report_console(width: int, stderr: bool = False) -> Console:
    """Return a console for tables: as wide as the terminal, or of this width in a file or a pipe."""
    console = Console(stderr=stderr)
    # Without a terminal rich assumes 80 columns, in which tables would lose theirs.
    return console if console.is_terminal else Console(stderr=stderr, width=width)
