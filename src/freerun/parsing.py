"""From the words of a command line to a dataclass: its fields are flags, the docstrings under them the help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Options = TypeVar("Options")
NOTHING = "None"
KINDS = {
    int: ("INT", "a whole number such as 1000"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a word"),
    Path: ("PATH", "a path"),
}
RULES = ConstructorRegistry()
EnvArg = bool | int | float | str
EnvArgs = Annotated[dict[str, EnvArg], tyro.conf.arg(metavar="NAME VALUE …", help_behavior_hint="(none if not given)")]
"""Arguments for an environment."""


def parse(kind: type[Options], words: Sequence[str], **about: Any) -> Options:
    """All words must be flags of this kind; --help explains them."""
    with RULES:
        options: Options = tyro.cli(kind, args=words, **about)
    return options


def parse_known(kind: type[Options], words: Sequence[str]) -> tuple[Options, list[str]]:
    """What is meant for this kind, and the other words."""
    with RULES:
        return tyro.cli(kind, args=words, return_unknown_args=True, add_help=False)


@RULES.primitive_rule
def _plain(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """`--workers INT` where tyro would write `{None}|INT`, and a sentence for what is none."""
    kinds = set(get_args(info.type)) or {info.type}
    optional = NoneType in kinds
    kinds -= {NoneType}
    if len(kinds) != 1 or not kinds <= KINDS.keys():
        return None
    (kind,) = kinds
    metavar, described = KINDS[kind]

    def read(words: list[str]) -> Any:
        if optional and words[0] == NOTHING:
            return None
        try:
            value = kind(words[0])
        except ValueError:
            value = math.nan
        if value != value:
            raise ValueError(f"it takes {described}, not {words[0]!r}")
        return value

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: value is None if value is None else isinstance(value, kind),
        str_from_instance=lambda value: [NOTHING if value is None else str(value)],
    )
