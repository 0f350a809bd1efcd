"""`freerun probe`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rich.console import Console

from freerun.core import UserError
from freerun.settings.flag_parsing import parse, parse_known
from freerun.tools.cli import report_console


@dataclass(frozen=True)
class _ProbeFlags:
    json: bool = False
    """Print everything as JSON."""
    workers: str | None = None
    """The numbers of workers to predict for, such as 1,10,100 (a choice that suits this machine if not given)."""


def probe(words: list[str]) -> int:
    """Measure an environment and this machine, and predict how fast each mode would train."""
    about = f"{probe.__doc__} It takes all flags of `freerun train` too: they say what would be trained, and how."
    # The help of `freerun train` would hide the two flags of this command.
    if {"-h", "--help"} & set(words):
        parse(_ProbeFlags, ["--help"], prog="freerun probe ENV", description=about)
    options, rest = parse_known(_ProbeFlags, words)
    from freerun.settings.registry import real_name
    from freerun.tools.cli.train_flags import Flags
    from freerun.tools.probe import auto_mode, probe_report

    counts = _counts(options.workers)
    flags = Flags.read(rest, None)
    given = flags.options.get("mode", auto_mode.AUTO)
    modes = auto_mode.candidates() if given == auto_mode.AUTO else [real_name(given)]
    # On stderr, so that --json leaves nothing but JSON on stdout.
    with Console(stderr=True).status("probing") as status:
        found, configs = auto_mode.look(
            modes,
            functools.partial(flags.config, prog="freerun probe"),
            fresh=True,
            say=lambda doing: status.update(f"probing: {doing}"),
            counts=counts,
            given=flags.given,
        )
    config = configs[found.best.mode]
    if options.json:
        print(probe_report.to_json(found, config, rest))
    else:
        probe_report.print_report(found, config, report_console(140), rest, counts)
    return 0


def _counts(workers: str | None) -> list[int]:
    try:
        counts = sorted({int(word) for word in workers.split(",")}) if workers else []
    except ValueError:
        raise UserError(f"--workers takes numbers such as 1,10,100, not {workers!r}") from None
    if counts and counts[0] < 1:
        raise UserError(f"--workers must be at least 1, not {counts[0]}")
    return counts
