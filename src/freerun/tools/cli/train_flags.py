"""Turns the words of a command line into the settings of a run. `freerun train` and `freerun probe` take the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from freerun.core import Common, UserError
from freerun.persistence import trust
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.files import read_json
from freerun.run import resume, series
from freerun.settings import env_flags, registry
from freerun.settings.config import TrainConfig
from freerun.settings.flag_parsing import parse, parse_known
from freerun.settings.named_code import code_in
from freerun.settings.presets import settings_of
from freerun.tools.cli import train_help
from freerun.tools.probe import auto_mode

TRAIN_HELP = "Train an agent on an environment."
# Empty lines between sentences, because tyro joins lines and does not wrap them.
COMMON_HELP = """These are the flags that most people need; --help-all shows all of them.

`freerun list` names environments, algorithms, modes and presets."""
ALL_HELP = """These are all flags for one algorithm, one mode and one environment.

To see those of others: freerun train ENV --algo sac --mode ray --help-all"""


@dataclass(frozen=True)
class StartFlags:
    """Flags that choose what a run starts from."""

    config: Common[Path | None] = None
    """Start from the config.json of another run."""
    preset: Common[Annotated[tuple[str, ...], tyro.conf.UseAppendAction]] = ()
    """Start from settings that go together (the flag may be given again; a later preset overrides an earlier one)."""
    resume: Common[Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR")]] = None
    """Continue a run that was stopped or killed, from its newest whole checkpoint."""
    trust: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Allow code that a file from elsewhere names as module:callable (the flag may be given again)."""
    task: str | None = None
    """Another way to name the environment."""


@dataclass(frozen=True)
class _FirstFlags(StartFlags):
    """What must be known before the other flags can be parsed, because they depend on the algorithm and the mode."""

    algo: str | None = None
    mode: str | None = None
    num_workers: str | None = None


@dataclass(frozen=True)
class Flags:
    """What was given on the command line, before --mode auto has chosen a mode."""

    options: dict[str, Any]
    """Settings from a file, a preset or a run, and the algorithm, the mode and the environment if they are known."""
    words: list[str]
    """All other words, which are parsed when the mode is known."""
    resumed: Checkpoint | None = None
    resumes: bool = False
    """True if --resume was given. Without a checkpoint in `resumed`, the folder is that of a series."""
    task: str | None = None
    """The environment, if --task named it."""

    @classmethod
    def read(cls, words: Sequence[str], task: str | None) -> Flags:
        """Read what --config, --preset and --resume bring. `task` is the environment, if it is known already."""
        first, rest = parse_known(_FirstFlags, words)
        options: dict[str, Any] = {}
        resumed = None
        # Whoever types a name trusts it.
        named = [*first.trust, *rest, *(name for name in (first.algo, first.mode) if name)]
        if first.resume is not None:
            auto_mode.refuse(dataclasses.asdict(first), "a run goes on in the mode that is named, or in its own")
            if first.config or first.preset:
                raise UserError("--resume goes on with a run's own settings: leave --config and --preset out")
            if series.is_series(first.resume):
                options = series.resumed_config(first.resume)
                trust.check(code_in(options), first.resume, named)
            else:
                resumed = resume.newest(first.resume)
                trust.check(code_in(resume.settings_of(resumed, first.resume)), first.resume, named)
                options = resume.settings_of(resumed, first.resume, first.mode)
        elif first.config is not None:
            options = read_json(first.config)
            trust.check(code_in(options), first.config.parent, named)
            if options.get("run_dir") is not None and not any(word.startswith("--run-dir") for word in rest):
                raise UserError(f"{first.config} names a folder to write to: give it yourself as --run-dir")
            if first.mode == auto_mode.AUTO and options.get("mode") in registry.MODES:
                # Without the settings that only the mode of the file has.
                options = resume.in_mode(options, TrainConfig.mode)
        options.update(settings_of(first.preset))
        options.update({name: value for name in ("algo", "mode") if (value := getattr(first, name)) is not None})
        if first.num_workers == auto_mode.AUTO:
            options["num_workers"] = auto_mode.AUTO
        elif first.num_workers is not None:
            # The flag must win over the file: it is parsed again with the others.
            options.pop("num_workers", None)
            rest = ["--num-workers", first.num_workers, *rest]
        # The flags that there are depend on the environment, so it must be known before they can be parsed.
        if (env := task or first.task or env_flags.named_env(rest)) is not None:
            options["env"] = env
        return cls(options, rest, resumed, first.resume is not None, first.task)

    @property
    def is_open(self) -> bool:
        """True if freerun is to choose the mode or the number of workers."""
        return auto_mode.is_open(self.options)

    @property
    def given(self) -> frozenset[str]:
        """The names of all settings that were given, as flags or by a file or a preset."""
        return frozenset({*self.options, *self._flag_names()}) - {"mode"}

    def _flag_names(self) -> list[str]:
        words = [word for word in self.words if word.startswith("--")]
        return [word[2:].partition("=")[0].removeprefix("no-").replace("-", "_") for word in words]

    def config(self, mode: str | None = None, prog: str = "freerun train", about: str = TRAIN_HELP) -> Any:
        """Parse the other words into the config of a run, in its own mode or in this one."""
        options = self.options if mode is None else auto_mode.in_mode(self.options, mode)
        config_class = registry.config_class(options)
        # tyro would only say that it does not know the flag. This says whose flag it is.
        for name in self._flag_names():
            registry.check_name(name, options)
        default: Any = registry.make_config({"env": "", **options})
        if not default.env:
            default = dataclasses.replace(default, env=tyro.MISSING)
        if train_help.HELP_ALL in self.words:
            train_help.print_help(default, StartFlags(), prog, f"{about}\n\n{ALL_HELP}", everything=True)
        if set(train_help.HELP) & set(self.words):
            train_help.print_help(default, StartFlags(), prog, f"{about}\n\n{COMMON_HELP}", everything=False)
        config = parse(
            config_class,
            self.words,
            prog=prog,
            description=about,
            # tyro would make a flag for each name in a dictionary that is not empty, and accept no other names.
            default=dataclasses.replace(default, env_args={}),
        )
        if self.task is not None and config.env != self.task:
            raise UserError(f"--task {self.task} and ENV {config.env} are two environments: name one of them")
        return dataclasses.replace(
            config,
            env_args={**default.env_args, **config.env_args},
            env_settings=env_flags.fitted(config.env_settings, config.env),
        )
