"""A module for each command: its flags, and what it prints. What takes long to import is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

INTERRUPTED = 130
"""The exit code of what was ended by Ctrl-C or SIGTERM."""
RunDir = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
Trusted = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        help="Code that a folder from elsewhere names (module:callable), if it may run (the flag may be given again)."
    ),
]
