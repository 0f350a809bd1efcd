"""One module per command: its flags, and what it prints. Slow imports happen inside the commands, so --help is
quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

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
