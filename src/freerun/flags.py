"""From the words of a command line to the settings of a run: `freerun train` and `freerun probe` take the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from freerun import registry, resuming, series
from freerun.config import TrainConfig
from freerun.core import UserError
from freerun.parsing import parse, parse_known
from freerun.persistence import origin
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.files import read_json
from freerun.presets import settings_of
from freerun.probing import auto

TRAIN_HELP = """Train an agent on an environment. Beside the flags below, which override what these bring:
  --config FILE     starts from the config.json of another run
  --preset NAME     starts from settings that go together (`freerun list` names them)
  --resume RUN_DIR  goes on with a run that was stopped or killed, from its newest checkpoint that is whole
  --trust NAME      lets code run that a file from elsewhere names (module:callable)
  --mode auto       measures the environment and this machine, and chooses"""


@dataclass(frozen=True)
class _First:
    """What must be known before the other flags can be: they depend on the algorithm and the mode."""

    algo: str | None = None
    mode: str | None = None
    num_workers: str | None = None
    config: Path | None = None
    resume: Path | None = None
    preset: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    trust: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    task: str | None = None


@dataclass(frozen=True)
class Flags:
    """What was given, before a mode is settled."""

    options: dict[str, Any]
    """By file, preset or run; with the algorithm, the mode and an environment where they are known."""
    words: list[str]
    """The other flags."""
    resumed: Checkpoint | None = None
    resumes: bool = False
    task: str | None = None
    """The environment, where it was named by --task."""

    @classmethod
    def read(cls, words: Sequence[str], task: str | None) -> Flags:
        first, rest = parse_known(_First, words)
        options: dict[str, Any] = {}
        resumed = None
        named = [*first.trust, *rest, *(name for name in (first.algo, first.mode) if name)]
        if first.resume is not None:
            auto.refuse(dataclasses.asdict(first), "a run goes on in the mode that is named, or in its own")
            if first.config or first.preset:
                raise UserError("--resume goes on with a run's own settings: leave --config and --preset out")
            if series.is_series(first.resume):
                options = series.resumed_config(first.resume)
                origin.check(options, first.resume, named)
            else:
                resumed = resuming.newest(first.resume)
                origin.check(resuming.settings_of(resumed, first.resume), first.resume, named)
                options = resuming.settings_of(resumed, first.resume, first.mode)
        elif first.config is not None:
            options = read_json(first.config)
            origin.check(options, first.config.parent, named)
            if options.get("run_dir") is not None and not any(word.startswith("--run-dir") for word in rest):
                raise UserError(f"{first.config} names a folder to write to: give it yourself as --run-dir")
            if first.mode == auto.AUTO and options.get("mode") in registry.MODES:
                options = resuming.in_mode(
                    options, TrainConfig.mode
                )  # what only its own mode has a word for is left out
        options.update(settings_of(first.preset))
        options.update({name: value for name in ("algo", "mode") if (value := getattr(first, name)) is not None})
        if first.num_workers == auto.AUTO:
            options["num_workers"] = auto.AUTO
        elif first.num_workers is not None:
            options.pop("num_workers", None)
            rest = ["--num-workers", first.num_workers, *rest]
        if task is not None:
            options["env"] = task
        return cls(options, rest, resumed, first.resume is not None, first.task)

    @property
    def is_open(self) -> bool:
        """Whether the mode or the number of workers is to be chosen."""
        return auto.is_open(self.options)

    def config(self, mode: str | None = None, prog: str = "freerun train", about: str = TRAIN_HELP) -> Any:
        """The config of a run, in its own mode or in this one."""
        options = self.options if mode is None else auto.in_mode(self.options, mode)
        config_class = registry.config_class(options)
        for word in self.words:
            if word.startswith("--"):
                name = word[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
                registry.check_name(name, options)
        default: Any = registry.make_config({"env": "", **options})
        if not default.env:
            default = dataclasses.replace(default, env=tyro.MISSING)
        config = parse(
            config_class,
            self.words,
            prog=prog,
            description=about,
            # A dictionary that is not empty would become a flag for each of its names, and no other could be given.
            default=dataclasses.replace(default, env_args={}),
        )
        if self.task is not None and config.env != self.task:
            raise UserError(f"--task {self.task} and ENV {config.env} are two environments: name one of them")
        return dataclasses.replace(config, env_args={**default.env_args, **config.env_args})
