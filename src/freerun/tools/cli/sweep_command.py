"""`freerun sweep`."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from freerun.core import UserError
from freerun.settings.flag_parsing import parse, parse_known
from freerun.tools.cli import INTERRUPTED, Trusted, report_console
from freerun.tools.sweep.sweep_options import SweepOptions

VARY = "--vary"
RESUMED_MAY_CHANGE = ("trials", "at_once")


@dataclass(frozen=True)
class _SweepFlags(SweepOptions):
    """The flags of this command, besides those of `freerun train`."""

    vary: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="FLAG VALUES", help_behavior_hint="(the flag may be given again)"),
    ] = ()
    """Vary a flag of `freerun train`: over a range (learning-rate 1e-5:1e-2:log, num-epochs 2:10) or over a list of
    values (hidden-sizes 64,64 256,256)."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Go on with a sweep that was stopped or killed. --trials and --at-once may be given anew."""


@dataclass(frozen=True)
class _OnlyTrust:
    trust: Trusted = ()


def sweep(words: list[str]) -> int:
    """Search for the settings that train best: many trainings by the same workers, chosen by Optuna."""
    if {"-h", "--help"} & set(words):
        about = f"{sweep.__doc__} It takes all flags of `freerun train` too, which hold for every trial."
        parse(_SweepFlags, ["--help"], prog="freerun sweep ENV", description=about)
    vary, rest = split_vary(words)
    flags, rest = parse_known(_SweepFlags, rest)
    options = SweepOptions(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(SweepOptions)})
    from freerun.tools.cli.train_flags import Flags
    from freerun.tools.probe import auto_mode
    from freerun.tools.probe.device_choice import choose_device
    from freerun.tools.sweep import sweep_report
    from freerun.tools.sweep.sweep import Sweep

    # SIGTERM ends a sweep as Ctrl-C does: it can be resumed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if flags.resume is not None:
        if vary:
            raise UserError("--resume goes on with what the sweep varies already: leave --vary out")
        changed = {name: getattr(options, name) for name in RESUMED_MAY_CHANGE if _is_given(name, words)}
        trusted = parse(_OnlyTrust, rest, prog="freerun sweep --resume FOLDER").trust
        search = Sweep.resumed(flags.resume, changed, trusted)
    else:
        train = Flags.read(rest, None)
        if train.resumes:
            raise UserError("name the folder of the sweep: freerun sweep --resume FOLDER")
        config = auto_mode.settle(train.options, train.config, train.given) if train.is_open else train.config()
        search = Sweep.new(choose_device(config), vary, options)
    is_quiet = search.config.quiet
    result = search.run(lambda line: None if is_quiet else print(line, file=sys.stderr, flush=True))
    sweep_report.print_table(result.trials, [dimension.name for dimension in search.dimensions], report_console(140))
    if result.best is not None:
        best = result.folder / sweep_report.BEST
        print(f"Best: trial {result.best.number}, score {result.best.score:.2f}  (freerun train --config {best})")
    print(f"Sweep folder: {result.folder}")
    if result.outcome == "interrupted":
        print(f"Train the rest: freerun sweep --resume {result.folder}")
        return INTERRUPTED
    return 0


def _is_given(name: str, words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in (f"--{name}", f"--{name.replace('_', '-')}") for word in words)


def split_vary(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Take each --vary FLAG VALUES out of the words. The values end where the next flag begins."""
    vary: dict[str, list[str]] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word != VARY:
            rest.append(word)
            continue
        if not left or left[0] == VARY:
            raise UserError("--vary names no flag: give a flag of freerun train and its values")
        name = left.pop(0).removeprefix("--")
        if name.replace("_", "-") in (known.replace("_", "-") for known in vary):
            raise UserError(f"--vary {name} is given twice: give it once, with all of its values")
        vary[name] = []
        # A word such as -1:1 is a value, not a flag.
        while left and not (left[0].startswith("-") and not left[0][1:2].isdigit()):
            vary[name].append(left.pop(0))
    return vary, rest
