"""Refuses symbolic links that lead out of a run folder: a run that is resumed would write to their targets."""

from __future__ import annotations

import os
from pathlib import Path

from freerun.core import UserError


def refuse_links_out(folder: Path) -> None:
    """Raise UserError for such a link. In a folder from elsewhere, metrics.jsonl could lead to a file of the user's."""
    top = folder.resolve()
    # Links to folders are listed but not followed: one could lead in a circle, or through the whole disk.
    for parent, folders, files in os.walk(top, followlinks=False):
        for name in (*folders, *files):
            path = Path(parent) / name
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise UserError(
                    f"{path} is a link to {os.readlink(path)}, where a run in {folder} would write: "
                    "remove it, or put what it leads to in its place"
                )
