"""Settings that an environment declares for itself are flags and keys of config.json for it alone."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freerun.adapters.catalog import ENV_SETTINGS
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSettings, UserError
from freerun.settings import env_flags, registry
from freerun.settings.config import AdaptConfig, TrainConfig
from freerun.settings.registry import flatten_config, make_config
from freerun.telemetry.tracking import TrackingConfig
from freerun.tools.cli.main import main
from freerun.tools.cli.train_flags import Flags

DEFENCE = "freerun/NetworkDefence-v0"
ORDER = "op_server,enterprise,op_host,defender,user"
OLD_NULLS: dict[str, Any] = {
    "red_agent": None,
    "episode_steps": None,
    "cyborg_path": None,
    "workflow": [],
    "workflows": None,
    "compliance_weight": None,
}
"""What version 0.1.0 wrote into the config.json of every run."""


@pytest.mark.parametrize("env", ["CartPole-v1", DEFENCE, "cyborg/CAGE2-v0"])
def test_settings_that_nobody_gave_are_read_from_old_files(env: str) -> None:
    config = make_config({"env": env, **OLD_NULLS})
    assert type(config.env_settings) is env_flags.settings_class(env)
    flat = flatten_config(config)
    assert [name for name in OLD_NULLS if name in flat and flat[name] not in (None, ())] == []


def test_they_are_flat_keys_of_their_environment_only() -> None:
    flat = flatten_config(make_config({"env": DEFENCE, "red_agent": "SleepAgent", "workflows": "orders.txt"}))
    assert (flat["red_agent"], flat["workflows"]) == ("SleepAgent", "orders.txt")
    assert make_config(json.loads(json.dumps(flat))) == make_config(flat)
    assert OLD_NULLS.keys().isdisjoint(flatten_config(make_config({"env": "CartPole-v1"})))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["CartPole-v1", "--red-agent", "SleepAgent"], "--red-agent is a setting of freerun/NetworkDefence-v0 and cy"),
        (["CartPole-v1", "--workflow", ORDER], "--workflow is a setting of freerun/NetworkDefence-v0 and cyborg/CAGE2"),
        ([DEFENCE, "--cyborg-path", "there"], "--cyborg-path is a setting of cyborg/CAGE2-v0 only: leave it out"),
    ],
)
def test_another_environment_refuses_them_in_one_sentence(
    words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"freerun: {flag}")


def test_from_python_and_from_a_file_too() -> None:
    with pytest.raises(UserError, match="--episode-steps is a setting of freerun/NetworkDefence-v0 and cyborg/CAGE2"):
        make_config({"env": "CartPole-v1", "episode_steps": 10})


@pytest.mark.parametrize("words", [[DEFENCE], ["--task", DEFENCE]])
def test_the_flags_are_there_wherever_the_environment_is_named(words: list[str]) -> None:
    config = Flags.read([*words, "--episode-steps", "7", "--workflow", ORDER], None).config()
    assert config.env == DEFENCE
    assert config.env_settings.episode_steps == 7
    assert list(config.env_settings.series()) == [ORDER]


def test_the_environment_of_a_file_can_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"env": DEFENCE, **OLD_NULLS}))
    config = Flags.read(["CartPole-v1", "--config", str(file)], None).config()
    assert type(config.env_settings) is EnvSettings
    file.write_text(json.dumps({"env": DEFENCE, "red_agent": "SleepAgent"}))
    with pytest.raises(UserError, match="--red-agent is a setting of"):
        Flags.read(["CartPole-v1", "--config", str(file)], None).config()


@pytest.mark.parametrize("env", ENV_SETTINGS)
def test_no_name_has_two_meanings(env: str) -> None:
    """Or the flag of the environment would hide that of an algorithm or a mode."""
    names = {field.name for field in dataclasses.fields(env_flags.settings_class(env))}
    entries: list[Any] = [*registry.ALGORITHMS.values(), *registry.MODES.values()]
    parts = [TrainConfig, TrackingConfig, AdaptConfig, *(entry.load_config() for entry in entries)]
    assert names.isdisjoint(field.name for part in parts for field in dataclasses.fields(part))


def test_an_own_algorithm_may_use_the_name_of_another_environments_setting() -> None:
    config = make_config({"env": "CartPole-v1", "algo": f"{__name__}:WithEpisodeSteps", "episode_steps": 5})
    assert config.algorithm.episode_steps == 5


@dataclass(frozen=True)
class _WithEpisodeSteps(PPOConfig):
    episode_steps: int | None = None


class WithEpisodeSteps(PPO):
    Config = _WithEpisodeSteps
