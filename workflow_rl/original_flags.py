"""The flags of the original scripts, said in freerun's words."""

from __future__ import annotations

import sys

from freerun.cli import main

FLAGS = {"--n-envs": "--num-workers", "--n-workers": "--num-workers"}


def translate(words: list[str]) -> list[str]:
    """Old names become new ones, underscores become dashes; everything else is freerun's."""
    translated = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            flag = FLAGS.get(flag, flag)
        translated.append(flag + equals + value)
    return translated


def train(mode: str, defaults: dict[str, str]) -> int:
    """`freerun train` on CybORG where its folder is given, on the built-in network otherwise."""
    words = translate(sys.argv[1:])
    env = "cyborg/CAGE2-v0" if "--cyborg-path" in words else "freerun/NetworkDefence-v0"
    preset = [word for flag, value in defaults.items() if flag not in words for word in (flag, value)]
    return main(["train", env, "--mode", mode, "--display", "classic", *preset, *words])
