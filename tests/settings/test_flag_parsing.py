"""Arguments for an environment, as words of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from freerun.core import UserError
from freerun.settings.flag_parsing import parse, read_env_args
from freerun.tools.cli.main import main


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", {}),
        ("size 7", {"size": 7}),
        ("size=7", {"size": 7}),
        ("size=7 kind busy speed=0.5 far True", {"size": 7, "kind": "busy", "speed": 0.5, "far": True}),
        ("a -1 b=-1 c 1e-3 d=False e true f=None", {"a": -1, "b": -1, "c": 1e-3, "d": False, "e": "true", "f": "None"}),
        ("sim.dt=0.005 scene.name warehouse", {"sim.dt": 0.005, "scene.name": "warehouse"}),
        ("path a=b url=x?y=z empty=", {"path": "a=b", "url": "x?y=z", "empty": ""}),
    ],
)
def test_names_and_values_may_be_one_word_or_two(words: str, found: dict[str, Any]) -> None:
    read = read_env_args(words.split())
    assert read == found
    assert [type(value) for value in read.values()] == [type(value) for value in found.values()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("size", "'size' has no value"),
        ("size=7 kind", "'kind' has no value"),
        ("=7", "'' cannot be the name of an argument"),
        ("7 size", "'7' cannot be the name of an argument"),
        ("size=7 size 8", "'size' is given twice"),
    ],
)
def test_what_is_no_pair_is_told_with_an_example(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=message):
        read_env_args(words.split())
    assert main(["check-env", "CartPole-v1", "--env-args", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"freerun: --env-args: {message}")


def test_it_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "CartPole-v1", "--env-args", "a=1", "--env-args", "b=2"]) == 2
    assert "--env-args is given twice: give it once" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["size=7"], ["size", "7"]])
def test_every_command_takes_both(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "check-env", "probe", "bench"):
        assert main([command, "CartPole-v1", "--env-args", *words]) == 2
        assert "unexpected keyword argument 'size'" in capsys.readouterr().err


@dataclass
class _Pair:
    growth: tuple[int, int] = (1, 2)


def test_a_pair_of_numbers_takes_two_words() -> None:
    assert parse(_Pair, ["--growth", "5000", "9000"]).growth == (5000, 9000)
