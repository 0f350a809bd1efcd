"""`freerun replay`."""

from __future__ import annotations

from dataclasses import dataclass

from freerun.commands import RunDir, Trusted
from freerun.parsing import parse


@dataclass(frozen=True)
class _Replay:
    run_dir: RunDir
    """Folder of a run."""
    until_update: int | None = None
    """Stop in a debugger before this update."""
    trust: Trusted = ()


def replay(words: list[str]) -> int:
    """Re-enact a run in one process, from its ledger: the same steps, the same updates, the same weights."""
    options = parse(_Replay, words, prog="freerun replay", description=replay.__doc__)
    from freerun.replaying import replay as again

    found = again(options.run_dir, options.until_update, options.trust)
    print(found)
    return 0 if found.is_same else 1
