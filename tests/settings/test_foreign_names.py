"""Names that other libraries have for settings lead to the names here."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import freerun
from freerun.core import UserError
from freerun.settings import registry
from freerun.settings.config import TrainConfig
from freerun.settings.foreign_names import SYNONYMS
from freerun.tools.cli.main import main

ALIASES = [(alias, here) for here, aliases in SYNONYMS.items() for alias in aliases]


def test_what_they_lead_to_are_settings_of_a_run() -> None:
    parts = [TrainConfig, *(entry.load_config() for entry in registry.ALGORITHMS.values())]
    real = {field.name for part in parts for field in dataclasses.fields(part)} - set(registry.PARTS)
    assert set(SYNONYMS) <= real


def test_none_has_two_meanings_or_is_a_setting_of_every_run() -> None:
    assert [alias for alias, number in Counter(alias for alias, _ in ALIASES).items() if number > 1] == []
    of_every_run = {field.name for field in dataclasses.fields(TrainConfig)} - set(registry.PARTS)
    assert of_every_run.isdisjoint(alias for alias, _ in ALIASES)


@pytest.mark.parametrize(("alias", "here"), ALIASES)
def test_each_is_answered_with_the_name_here(alias: str, here: str) -> None:
    with pytest.raises(UserError, match=f"unknown setting '{alias}': it is called {here} here"):
        registry.make_config({"env": "CartPole-v1", alias: 1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "0.1"], "unknown setting 'lr': it is called learning_rate here (--learning-rate)\n"),
        (["--n-envs=4"], "it is called num_workers here (--num-workers)\n"),
        (["--total_timesteps", "9"], "it is called total_steps here (--total-steps)\n"),
        (["--batch-size", "9"], "it is called minibatch_size here (--minibatch-size)\n"),
        (
            ["--tau", "0.1"],
            "called target_rate here (--target-rate) and belongs to --algo sac or fastsac or dqn or mbpo\n",
        ),
        (["--algo", "sac", "--clip-range", "0.1"], "unknown setting 'clip_range': it belongs to --algo ppo\n"),
    ],
)
def test_flags_too(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "CartPole-v1", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_name_that_the_algorithm_has_is_taken(run_dir: Path) -> None:
    """SAC's own --batch-size, which for PPO would be --minibatch-size."""
    settings: dict[str, Any] = {"batch_size": 16, "learning_starts": 10, "steps_per_update": 10, "mode": "sequential"}
    result = freerun.train("Pendulum-v1", algo="sac", total_steps=20, quiet=True, run_dir=run_dir, **settings)
    assert result.summary["env_steps"] >= 20
