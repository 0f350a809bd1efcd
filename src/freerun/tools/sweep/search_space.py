"""The settings that a sweep varies: ranges of numbers and lists of values, as users write them."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tyro

from freerun.core import UserError
from freerun.settings.config import AnyConfig
from freerun.settings.flag_parsing import parse
from freerun.settings.registry import changed_config, check_kinds, check_name, setting_kinds

LOG = "log"
NOT_VARIED = {
    "env": "run a sweep for each environment",
    "algo": "run a sweep for each algorithm, because their settings differ",
    "mode": "run a sweep for each mode, because their settings differ",
    "seed": "--seeds-per-trial trains each trial with several seeds",
    "run_dir": "each trial has its own folder in that of the sweep",
    "num_learners": "the trainings of a sweep have one learner",
}
"""Settings that a sweep cannot vary, and what to do instead."""
EXAMPLE = "as in --vary learning-rate 1e-5:1e-2:log or --vary hidden-sizes 64,64 256,256"

Parameter = float | int | str
"""What Optuna stores for one setting of a trial: a number of a range, or the text of a value of a list."""


@dataclass(frozen=True)
class Dimension:
    """One setting that is varied: over a list of values, or over a range if there is none."""

    name: str
    """The setting, by its name in config.json."""
    values: tuple[Any, ...] = ()
    low: float | int = 0
    high: float | int = 0
    is_log: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_range(self) -> bool:
        return not self.values

    @property
    def is_whole(self) -> bool:
        """True for a range of whole numbers."""
        return isinstance(self.low, int)

    @property
    def texts(self) -> list[str]:
        """The values of the list, as tables show them and as Optuna stores them."""
        return [text_of(value) for value in self.values]

    def suggest(self, trial: Any) -> Parameter:
        """Ask an `optuna.Trial` for the parameter of this setting."""
        if not self.is_range:
            return str(trial.suggest_categorical(self.name, self.texts))
        ask = trial.suggest_int if self.is_whole else trial.suggest_float
        found: float | int = ask(self.name, self.low, self.high, log=self.is_log)
        return found

    def value(self, parameter: Parameter) -> Any:
        """Return the value of the setting that a parameter stands for."""
        return parameter if self.is_range else self.values[self.texts.index(str(parameter))]


def text_of(value: Any) -> str:
    """Write a value as it is typed after --vary."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={part}" for name, part in value.items())
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def with_values(config: AnyConfig, values: Mapping[str, Any]) -> AnyConfig:
    """Return the settings of a trial. Arguments of the environment that are not varied stay as they are."""
    if "env_args" in values:
        values = {**values, "env_args": {**config.env_args, **values["env_args"]}}
    return changed_config(config, values)


def combinations(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Parameter]]:
    """Return the parameters of every combination of listed values: the trials of a grid."""
    for dimension in dimensions:
        if dimension.is_range:
            raise UserError(
                f"--sampler grid tries every combination of listed values, and {dimension.flag} has a range: list its "
                "values, or choose another --sampler"
            )
    names = [dimension.name for dimension in dimensions]
    for texts in itertools.product(*(dimension.texts for dimension in dimensions)):
        yield dict(zip(names, texts, strict=True))


# ---------------------------------------------------------------------------------------------- reading


def read_dimensions(vary: Mapping[str, Any], config: AnyConfig) -> list[Dimension]:
    """Read what is varied: for each setting, words as they are typed after --vary, or a list of values.

    Raises UserError for settings that there are not, and for values that a run with these settings would refuse.
    """
    if not vary:
        raise UserError(f"a sweep varies at least one setting: give --vary, {EXAMPLE}")
    options = {"algo": config.algo, "mode": config.mode, "env": config.env}
    kinds = setting_kinds(options)
    dimensions = []
    for given, values in vary.items():
        name = given.removeprefix("--").replace("-", "_")
        if name in NOT_VARIED:
            raise UserError(f"--vary cannot vary {given}: {NOT_VARIED[name]}")
        if name not in kinds:
            check_name(name, options)  # it says whose setting it is, if it is that of another algorithm or mode
            close = difflib.get_close_matches(name, list(kinds), n=1)
            hint = f"did you mean {close[0].replace('_', '-')}?" if close else "freerun train --help-all lists them"
            raise UserError(f"--vary names {given!r}, which is no setting: {hint}")
        words = [values] if isinstance(values, str) else list(values)
        if not words:
            raise UserError(f"--vary {given} has no values: give a range or several values, {EXAMPLE}")
        dimension = _dimension(name, words, kinds[name])
        for value in dimension.values or (dimension.low, dimension.high):
            check_kinds({name: value}, kinds)
            with_values(config, {name: value})  # raises what a run with this value would raise
        dimensions.append(dimension)
    return dimensions


def _dimension(name: str, words: Sequence[Any], kind: Any) -> Dimension:
    ends = _ends_of_range(words)
    if ends is None:
        values = [_read(name, kind, word) if isinstance(word, str) else word for word in words]
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        texts = [text_of(value) for value in values]
        if len(set(texts)) < len(texts):
            raise UserError(f"--vary {name.replace('_', '-')} names a value twice: give each value once")
        return Dimension(name, tuple(values))
    low, high = (_read(name, kind, word) for word in ends[:2])
    shown = f"--vary {name.replace('_', '-')} {words[0]}"
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        raise UserError(f"{shown}: this setting takes no numbers, so it has no range: list its values")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{shown}: a range ends at finite numbers")
    if low >= high:
        raise UserError(f"{shown}: the range is empty, because {ends[0]} is not below {ends[1]}")
    is_log = len(ends) == 3
    if is_log and low <= 0:
        raise UserError(f"{shown}: a logarithmic range must begin above 0")
    return Dimension(name, (), low, high, is_log)


def _ends_of_range(words: Sequence[Any]) -> list[str] | None:
    """Return the parts of LOW:HIGH or LOW:HIGH:log; None for a list of values, which may contain colons too."""
    if len(words) != 1 or not isinstance(words[0], str):
        return None
    parts = words[0].split(":")
    if len(parts) < 2 or not all(map(_is_number, parts[:2])):
        return None
    if len(parts) > 3 or (len(parts) == 3 and parts[2] != LOG):
        raise UserError(f"--vary takes a range as LOW:HIGH or LOW:HIGH:log, not {words[0]!r}")
    return parts


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _read(name: str, kind: Any, word: str) -> Any:
    """Read a word as the flag of this setting would; 64,64 stands for the two words of a tuple."""
    is_tuple = any(get_origin(part) is tuple for part in (kind, *get_args(kind)))
    # A switch takes True or False here, where `freerun train` has --name and --no-name.
    field: Any = (name, Annotated[kind, tyro.conf.FlagConversionOff])
    value = dataclasses.make_dataclass("Value", [field])
    words = word.split(",") if is_tuple else [word]
    return getattr(parse(value, [f"--{name.replace('_', '-')}", *words], prog="freerun sweep --vary"), name)


# ---------------------------------------------------------------------------------------------- in sweep.json


def pack(dimensions: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Return the dimensions as JSON."""
    packed = []
    for dimension in dimensions:
        ends = {"low": dimension.low, "high": dimension.high, "log": dimension.is_log}
        listed = [str(value) if isinstance(value, Path) else value for value in dimension.values]
        packed.append({"name": dimension.name, **(ends if dimension.is_range else {"values": listed})})
    return packed


def unpack(packed: Sequence[Mapping[str, Any]], config: AnyConfig) -> list[Dimension]:
    """Read the dimensions of a sweep that is resumed. The file may come from anywhere."""
    try:
        vary: dict[str, Any] = {}
        for entry in packed:
            ends = f"{entry.get('low')!r}:{entry.get('high')!r}" + (f":{LOG}" if entry.get("log") else "")
            listed = entry.get("values")
            vary[str(entry["name"])] = ends if listed is None else [_plain(value) for value in listed]
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the sweep's settings cannot be read: {error}") from None
    return read_dimensions(vary, config)


def _plain(value: Any) -> Any:
    """JSON has lists where settings have tuples."""
    return tuple(value) if isinstance(value, list) else value
