"""`freerun replay`."""

from __future__ import annotations

from bdb import BdbQuit
from dataclasses import dataclass

from freerun.settings.flag_parsing import parse
from freerun.tools.cli import RunDir, Trusted


@dataclass(frozen=True)
class _ReplayFlags:
    run_dir: RunDir
    """The folder of a run."""
    until_update: int | None = None
    """Stop in a debugger before this update."""
    trust: Trusted = ()


def replay(words: list[str]) -> int:
    """Replay a run in one process, from its ledger: the same steps, the same updates, the same weights."""
    options = parse(_ReplayFlags, words, prog="freerun replay", description=replay.__doc__)
    from freerun.run.replay_run import replay as replay_run

    try:
        found = replay_run(options.run_dir, options.until_update, options.trust)
    except BdbQuit:  # `quit` in the debugger, or its input has ended
        print("The debugger was quit: the rest of the run was not replayed.")
        return 0
    print(found)
    return 0 if found.is_same else 1
