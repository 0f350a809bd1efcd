"""Plain text for terminals and log files."""

from __future__ import annotations

import math

from rich.console import Console


def print_plain(console: Console, text: str) -> None:
    """Print text as it is: rich must neither wrap nor colour it, nor read brackets as markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def format_or_dash(value: float, form: str) -> str:
    """Format a mean over episodes; return a dash if no episode has ended yet."""
    return "–" if math.isnan(value) else format(value, form)
