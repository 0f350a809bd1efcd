"""Translates the flags of the original scripts to freerun's, and adds the original's defaults."""

from __future__ import annotations

from collections.abc import Sequence

from freerun.tools.cli.main import main

FLAGS = {"--n-envs": "--num-workers", "--n-workers": "--num-workers"}
DEFAULTS = {
    "--num-workers": "100",
    "--total-episodes": "100000",
    "--episodes-per-update": "100",
    "--red-agent": "B_lineAgent",
}
REPLACED_BY = {"--total-episodes": "--total-steps"}
"""A run that the user ends by steps gets no default that would end it by episodes."""


def train(mode: str, words: Sequence[str]) -> int:
    """Call `freerun train`: on CybORG if its folder is given, otherwise on the built-in network."""
    return main(command(mode, translate(words)))


def translate(words: Sequence[str]) -> list[str]:
    """Replace old names of flags by new ones and underscores by dashes. All other words stay."""
    translated = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            flag = FLAGS.get(flag, flag)
        translated.append(flag + equals + value)
    return translated


def command(mode: str, words: list[str]) -> list[str]:
    """The command line for freerun. A run that is resumed keeps its own settings, so it gets no defaults."""
    given = {word.partition("=")[0] for word in words}
    if "--resume" in given:
        return ["train", "--display", "classic", *words]
    env = "cyborg/CAGE2-v0" if "--cyborg-path" in given else "freerun/NetworkDefence-v0"
    defaults = [
        word
        for flag, value in DEFAULTS.items()
        if flag not in given and REPLACED_BY.get(flag) not in given
        for word in (flag, value)
    ]
    return ["train", env, "--mode", mode, "--display", "classic", *defaults, *words]
