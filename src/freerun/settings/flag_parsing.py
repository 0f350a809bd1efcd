"""Turns the words of a command line into a dataclass. Its fields are flags, and the docstrings under them are the
help."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from freerun.core import UserError

Options = TypeVar("Options")
NOTHING = "None"
"""The word that unsets a flag, as in --total-steps None."""
KINDS = {
    int: ("INT", "a whole number such as 1000"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a word"),
    Path: ("PATH", "a path"),
}
RULES = ConstructorRegistry()
"""How tyro reads and names the kinds of values that it would handle less clearly by itself."""
EnvArg = bool | int | float | str
EnvArgs = Annotated[dict[str, EnvArg], tyro.conf.arg(metavar="NAME VALUE …", help_behavior_hint="(none if not given)")]
"""Arguments for an environment, given as `name value` or `name=value`."""
ENV_ARGS_EXAMPLE = "give names and values, as in --env-args size 7 or --env-args size=7 kind=busy"
BOOLS = {"True": True, "False": False}
SWITCHES = ("normalize_advantage", "normalize_obs", "normalize_reward")
"""Settings that are on, off or left open. They are switched as others are that are only on or off: by --name and
--no-name."""


def parse(kind: type[Options], words: Sequence[str], **about: Any) -> Options:
    """Parse all words as flags of this dataclass. --help prints what they are, and exits."""
    # The parser would silently keep the last one only.
    if sum(word.partition("=")[0].replace("_", "-") == "--env-args" for word in words) > 1:
        raise UserError("--env-args is given twice: give it once, with all names and values after it")
    with RULES:
        options: Options = tyro.cli(kind, args=spell_out_switches(words), **about)
    return options


def spell_out_switches(words: Sequence[str]) -> list[str]:
    """Turn --name and --no-name into --name True and --name False, for switches that may be left open."""
    found: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name = word.removeprefix("--").replace("-", "_")
        is_off = name.startswith("no_")
        if name.removeprefix("no_") in SWITCHES and word.startswith("--") and following not in (*BOOLS, NOTHING):
            found += [f"--{name.removeprefix('no_').replace('_', '-')}", str(not is_off)]
        else:
            found.append(word)
    return found


def parse_known(kind: type[Options], words: Sequence[str]) -> tuple[Options, list[str]]:
    """Parse the flags of this dataclass, and return them with all other words."""
    with RULES:
        return tyro.cli(kind, args=words, return_unknown_args=True, add_help=False)


@RULES.primitive_rule
def _plain(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Show `--workers INT` where tyro would show `{None}|INT`, and answer a wrong value with a sentence."""
    # Only unions are taken apart: tuple[int, int] has arguments too, but takes two words.
    is_union = get_origin(info.type) in (Union, UnionType)
    kinds = set(get_args(info.type)) if is_union else {info.type}
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
        if value != value:  # NaN: not a number, or the word nan itself
            raise ValueError(f"it takes {described}, not {words[0]!r}")
        return value

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [NOTHING if value is None else str(value)],
    )


@RULES.primitive_rule
def _switch(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read True and False for a switch that may be left open."""
    if get_origin(info.type) not in (Union, UnionType) or set(get_args(info.type)) != {bool, NoneType}:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="True|False",
        instance_from_str=lambda words: BOOLS.get(words[0]),
        is_instance=lambda value: value is None or isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
        choices=(*BOOLS, NOTHING),
    )


@RULES.primitive_rule
def _env_args(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read `--env-args size 7 kind=busy`. tyro would take only names and values that are separate words."""
    if info.type != dict[str, EnvArg]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME VALUE …",
        instance_from_str=read_env_args,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [str(word) for pair in value.items() for word in pair],
    )


def read_env_args(words: Sequence[str]) -> dict[str, EnvArg]:
    """Read names and values. Each pair is one word (`size=7`) or two words (`size 7`)."""
    found: dict[str, EnvArg] = {}
    rest = list(words)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not has_value:
            if not rest:
                raise UserError(f"--env-args: {name!r} has no value: {ENV_ARGS_EXAMPLE}")
            value = rest.pop(0)
        if not all(part.isidentifier() for part in name.split(".")):  # Isaac Lab's fields lie within others
            raise UserError(f"--env-args: {name!r} cannot be the name of an argument: {ENV_ARGS_EXAMPLE}")
        # Silently keeping one of two values would hide a typo.
        if name in found:
            raise UserError(f"--env-args: {name!r} is given twice: give it once")
        found[name] = _env_arg(value)
    return found


def _env_arg(word: str) -> EnvArg:
    """Read a value as the first of these that fits: True or False, a whole number, a number, a word."""
    if word in BOOLS:
        return BOOLS[word]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word
