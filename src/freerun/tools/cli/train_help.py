"""`freerun train --help` and `--help-all`: the settings of a run in groups, common ones or all."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import tyro

from freerun.core.declared_settings import COMMON
from freerun.settings.config import HELP_GROUPS
from freerun.settings.flag_parsing import parse

HELP = ("-h", "--help")
HELP_ALL = "--help-all"


class _Flag(NamedTuple):
    name: str
    kind: Any
    default: Any
    about: str

    @property
    def is_common(self) -> bool:
        return COMMON in get_args(self.kind)


def print_help(config: Any, start: Any, prog: str, about: str, everything: bool) -> None:
    """Print the flags that this config has, and exit. `start` holds the flags that choose where a run starts from.

    tyro writes the page: it gets a dataclass for each group, made of the fields of all settings classes.
    """
    flags = {flag.name: [flag] for flag in _flags(config)}
    for name in (field.name for field in dataclasses.fields(config)):
        if dataclasses.is_dataclass(part := getattr(config, name)):
            flags[name] = list(_flags(part))  # the name of a part stands for all of its settings
    flags["start"] = list(_flags(start))
    groups: list[Any] = []
    for title, group in HELP_GROUPS.items():
        shown = [flag for name in group.settings for flag in flags[name] if everything or flag.is_common]
        if shown:
            kind = _group(title, group.about, shown)
            groups.append((title, tyro.conf.OmitArgPrefixes[kind]))  # type: ignore[misc, valid-type]
    page = dataclasses.make_dataclass("Page", groups)
    parse(page, ["--help"], prog=prog, description=about)


def _group(title: str, about: str, flags: list[_Flag]) -> Any:
    """A dataclass whose fields are these flags."""
    fields: list[Any] = []
    for flag in flags:
        # "default: None" and "default: False" say nothing: the text says what happens if such a flag is not given.
        silent = flag.default is None or flag.default is False or flag.default == ()
        hint = tyro.conf.arg(help=flag.about, help_behavior_hint="" if silent else None)
        default = dataclasses.field(default_factory=dict) if flag.default == {} else flag.default
        fields.append((flag.name, Annotated[flag.kind, hint], default))
    group = dataclasses.make_dataclass(title, fields)
    group.__doc__ = about
    return group


def _flags(settings: Any) -> Iterator[_Flag]:
    """The fields of a dataclass that are settings themselves, with the docstrings under them."""
    kinds = get_type_hints(type(settings), include_extras=True)
    docs = _field_docs(type(settings))
    for field in dataclasses.fields(settings):
        if not dataclasses.is_dataclass(value := getattr(settings, field.name)):
            yield _Flag(field.name, kinds[field.name], value, docs.get(field.name, ""))


def _field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a class, in one line. Python does not keep them, the source has them."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # a class that was typed into a prompt has no source
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
            assert isinstance(tree.body[0], ast.ClassDef)
            for field, text in itertools.pairwise(tree.body[0].body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        docs[name] = " ".join(words.split())
    return docs
