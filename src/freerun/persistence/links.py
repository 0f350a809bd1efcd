"""Links in a run folder that lead out of it: whoever goes on with the run would write there."""

from __future__ import annotations

import os
from pathlib import Path

from freerun.core import UserError


def refuse_links_out(folder: Path) -> None:
    """A folder from elsewhere could have its metrics.jsonl lead to a file of yours, to be cut off and written to."""
    top = folder.resolve()
    for parent, folders, files in os.walk(top, followlinks=False):
        for name in (*folders, *files):
            path = Path(parent) / name
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise UserError(
                    f"{path} is a link to {os.readlink(path)}, where a run in {folder} would write: "
                    "remove it, or put what it leads to in its place"
                )
