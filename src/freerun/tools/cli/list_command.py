"""`freerun list`."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from freerun.settings.flag_parsing import parse


@dataclass(frozen=True)
class _ListFlags:
    """List environments, algorithms, modes, trackers and presets."""


def list_names(words: list[str]) -> int:
    """List environments, algorithms, modes, trackers and presets."""
    parse(_ListFlags, words, prog="freerun list")
    from freerun.adapters import catalog
    from freerun.settings import presets, registry

    console = Console(markup=False)  # freerun[box2d] must not be read as markup
    for title, names in (
        ("Environments", {**{name: about for name, (_, about) in catalog.BUILT_IN.items()}, **catalog.OTHERS}),
        ("Algorithms (--algo)", {name: entry.description for name, entry in registry.ALGORITHMS.items()}),
        ("Modes (--mode)", _modes()),
        ("Trackers (--track)", {name: entry.description for name, entry in registry.TRACKERS.items()}),
        ("Presets (--preset)", {name: preset.about for name, preset in presets.PRESETS.items()}),
    ):
        table = Table.grid(padding=(0, 2))
        for name, about in names.items():
            table.add_row(f"  {name}", about)
        console.print(title, style="bold")
        console.print(table)
    return 0


def _modes() -> dict[str, str]:
    from freerun.settings.registry import MODES

    about_auto = "measures the environment and this machine, and chooses (`freerun probe` shows how)"
    return {**{name: entry.description for name, entry in MODES.items()}, "auto": about_auto}
