"""Presets: each is valid by itself, and flags override them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import freerun
from freerun.core import UserError
from freerun.settings import registry
from freerun.settings.presets import PRESETS, settings_of
from freerun.tools.cli.main import main


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    settings = {"env": "Pendulum-v1", **settings_of([name])}
    config = registry.make_config(settings)
    flat = registry.flatten_config(config)
    for key, value in PRESETS[name].settings.items():
        assert flat[key] == value


def test_a_later_preset_overrides_an_earlier_one() -> None:
    settings = settings_of(["mbpo-hopper", "mbpo-small"])
    assert settings["env"] == "Hopper-v5"
    assert settings["rollout_length_end"] == 15
    assert settings["learning_starts"] == 500


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean mbpo-hopper"):
        settings_of(["mbpo-hoper"])


def test_flags_override_presets(tmp_path: Path) -> None:
    flags = ["--mode", "sequential", "--total-steps", "60", "--learning-starts", "50", "--steps-per-update", "50"]
    flags += ["--run-dir", str(tmp_path / "run"), "-q", "--model-updates-per-step", "0.2"]
    assert main(["train", "--preset", "mbpo-inverted-pendulum", "--preset", "mbpo-small", *flags]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["env"] == "InvertedPendulum-v5"
    assert config["learning_starts"] == 50
    assert config["hidden_sizes"] == [64, 64]


SIMULATORS = {"sumo-intersection": "sumo_rl", "grid2op-case14": "grid2op", "atari-breakout": "ale_py"}


@pytest.mark.parametrize(("preset", "module"), SIMULATORS.items())
def test_a_preset_whose_simulator_is_missing_says_what_to_install(
    preset: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    assert main(["train", "--preset", preset, "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"pip install 'freerun[{preset.split('-')[0]}]'" in said


def test_presets_serve_python_too(tmp_path: Path) -> None:
    result = freerun.train(
        "Pendulum-v1",
        preset="continuous-64",
        algo="sac",
        total_steps=512,
        num_envs=8,
        hidden_sizes=(8,),
        learning_starts=0,
        updates_per_step=0.01,
        quiet=True,
        run_dir=tmp_path / "run",
    )
    assert result.summary["mode"] == "continuous"
    assert result.summary["num_workers"] == 8


def test_in_python_a_preset_may_name_the_environment(tmp_path: Path) -> None:
    result = freerun.train(
        preset="defender", total_episodes=4, episodes_per_update=2, quiet=True, run_dir=tmp_path / "run"
    )
    assert result.summary["outcome"] == "finished"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["env"] == "freerun/NetworkDefence-v0"
    with pytest.raises(UserError, match="no environment is named"):
        freerun.train(preset="continuous-64", quiet=True)
    with pytest.raises(UserError, match="no environment is named"):
        freerun.train(total_steps=10)


def test_arguments_of_the_environment_are_added_to_those_of_a_config(tmp_path: Path) -> None:
    flags = ["CartPole-v1", "--env-args", "render_mode", "rgb_array", "--total-steps", "20", "-q"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"env_args": {"sutton_barto_reward": True}}))
    assert main(["train", *flags, "--config", str(config), "--run-dir", str(tmp_path / "cart")]) == 0
    kept = json.loads((tmp_path / "cart" / "config.json").read_text())["env_args"]
    assert kept == {"sutton_barto_reward": True, "render_mode": "rgb_array"}
