"""`freerun search-workflows`."""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any

from freerun.core import UserError
from freerun.settings.flag_parsing import parse, parse_known
from freerun.tools.cli import INTERRUPTED, Trusted, report_console


def search_workflows(words: list[str]) -> int:
    """Find the best order in which a defender repairs groups of hosts."""
    from freerun.tools.workflow_search.order_search import SearchOptions, resumed, search
    from freerun.tools.workflow_search.search_report import print_ranking

    @dataclasses.dataclass(frozen=True)
    class SearchFlags(SearchOptions):
        resume: Path | None = None
        """Continue the search in this folder, with its own settings."""
        trust: Trusted = ()

    about = f"{search_workflows.__doc__} It takes the flags of `freerun train` too (docs/workflow_search.md)."
    # The help of `freerun train` would hide the flags of this command.
    if {"-h", "--help"} & set(words):
        parse(SearchFlags, ["--help"], prog="freerun search-workflows [ENV]", description=about)
    # SIGTERM ends a search as Ctrl-C does: finished trainings are kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    flags, rest = parse_known(SearchFlags, words)
    options = SearchOptions(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(SearchOptions)})
    if flags.resume is None:
        config = _config([*rest, *(word for name in flags.trust for word in ("--trust", name))])
    else:
        if rest:
            raise UserError(f"--resume goes on with the search's own settings: leave {rest[0]} out")
        config, known = resumed(flags.resume, list(flags.trust))
        options = dataclasses.replace(options, **known)
    result = search(config, options, lambda line: print(line, file=sys.stderr, flush=True))
    if result is None:
        return INTERRUPTED
    print_ranking(result.ranking, report_console(140))
    print(f"Search folder: {result.folder} (ranking.md, ranking.json, posterior.png, trainings.jsonl)")
    if result.outcome == "interrupted":
        print(f"Continue: freerun search-workflows --resume {result.folder}")
        return INTERRUPTED
    return 0


def _config(words: list[str]) -> Any:
    """Read the flags of `freerun train`, on top of the defaults of a search."""
    from freerun.tools.cli.train_flags import Flags
    from freerun.tools.workflow_search.order_search import DEFAULTS, defaults_beside, with_orders

    flags = Flags.read(words, None)
    if flags.is_open:
        raise UserError("a search needs a mode and a number of workers: --mode auto is for a single training")
    given = {**dict.fromkeys(flags.given), **flags.options}
    if given.keys() & {"workflow", "workflows"}:
        raise UserError("a search tries all workflows: leave --workflow and --workflows out")
    if words and not words[0].startswith("-"):
        given["env"] = words[0]  # any other ENV that is found has workflows
    with_orders({**DEFAULTS, **given})  # raises if the environment has none
    starts_from = {word.partition("=")[0] for word in words} & {"--config", "--preset"}
    options = flags.options if starts_from else {**defaults_beside(given), **flags.options}
    return dataclasses.replace(flags, options=with_orders(options)).config(prog="freerun search-workflows")
