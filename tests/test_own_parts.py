"""Algorithms and modes from outside the package, by name and as objects; and what is said of those that will not do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.collecting.modes.inline_collector import InlineCollector
from freerun.core import CollectorSettings, EnvFactory, ModeOptions, Policy, UserError
from freerun.run.replay_run import replay
from freerun.tools.cli.main import main

SMALL: dict[str, Any] = {"total_steps": 400, "steps_per_update": 200, "num_epochs": 1, "quiet": True}


@dataclass(frozen=True)
class GentleConfig(PPOConfig):
    gentleness: float = 2.0
    """A setting that only this one has."""


class Gentle(PPO):
    """PPO that learns a little slower."""

    Config = GentleConfig

    def __init__(self, env: Any, config: GentleConfig, *more: Any):
        super().__init__(env, config, *more)
        assert self.config.learning_rate is not None
        self._optimizer.set_learning_rate(self.config.learning_rate / config.gentleness)


class Several(InlineCollector):
    takes_turns = True

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        super().__init__(lambda: factory.make(settings.num_workers), policy, settings)


@dataclass(frozen=True)
class LanesConfig(ModeOptions):
    num_lanes: int = 2
    """Environments in this process."""


class Lanes(InlineCollector):
    Config = LanesConfig
    takes_turns = True

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: LanesConfig):
        super().__init__(lambda: factory.make(config.num_lanes), policy, settings)


class Useless:
    """It has none of what is needed."""


class Unsettled(Several):
    Config = dict


class Unrelated(Several):
    Config = GentleConfig


def test_an_own_algorithm_has_flags_metrics_checkpoints_and_a_replay(run_dir: Path) -> None:
    name = f"{__name__}:Gentle"
    words = ["--gentleness", "4", "--learning-rate", "0.002", "--num-workers", "2", "--run-dir", str(run_dir), "-q"]
    small = ["--total-steps", "400", "--steps-per-update", "200", "--num-epochs", "1"]
    assert main(["train", "toy_envs:OneBit", "--algo", name, *small, *words]) == 0
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["algo"], config["gentleness"], config["max_lag"]) == (name, 4.0, 1)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["learning_rate"] == pytest.approx(0.0005)
    assert replay(run_dir).is_same
    assert main(["train", "--resume", str(run_dir), "--total-steps", "600", "--mode", f"{__name__}:Several", "-q"]) == 0
    assert json.loads((run_dir / "config.json").read_text())["mode"] == f"{__name__}:Several"
    assert main(["train", "--resume", str(run_dir), "--total-steps", "800", "-q"]) == 0
    assert freerun.resume(run_dir, total_steps=1000, mode="sequential").summary["env_steps"] >= 1000


def test_classes_are_taken_as_they_are_and_an_own_mode_gives_the_same_weights_as_sequential(tmp_path: Path) -> None:
    settings = {**SMALL, "algo": Gentle, "deterministic": True}
    one = freerun.train("CartPole-v1", **settings, mode="sequential", run_dir=tmp_path / "one")
    several = freerun.train("CartPole-v1", **settings, mode=Several, num_workers=3, run_dir=tmp_path / "several")
    np.testing.assert_array_equal(one.policy.weights, several.policy.weights)


def test_an_own_mode_may_have_settings(run_dir: Path) -> None:
    result = freerun.train("CartPole-v1", **SMALL, mode=Lanes, num_lanes=3, run_dir=run_dir)
    assert result.summary["outcome"] == "finished"
    assert json.loads((run_dir / "config.json").read_text())["num_lanes"] == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algo": Useless}, "has no Config, no demand, no observe, no update.*docs/own_algorithm.md"),
        ({"mode": Useless}, "has no publish, no collect, no counts, no close: docs/own_mode.md"),
        ({"mode": Unsettled}, "is no dataclass: its fields become the mode's flags"),
        ({"mode": Unrelated}, "must inherit freerun.core.ModeOptions"),
        ({"mode": Several, "num_lanes": 3}, "unknown setting 'num_lanes'"),
        ({"algo": "no_such_module:X"}, "algorithm 'no_such_module:X': No module.*PYTHONPATH"),
        ({"mode": f"{__name__}:Nobody"}, f"module '{__name__}' has no 'Nobody'"),
        ({"algo": f"{__name__}:SMALL"}, "is not callable"),
        ({"algo": Gentle, "clip_rangee": 0.1}, "did you mean clip_range"),
        ({"mode": Several, "num_workers": "auto"}, "a probe cannot predict --mode .*, which declares no model"),
    ],
)
def test_what_will_not_do_is_said_in_a_sentence(settings: dict[str, Any], said: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=said):
        freerun.train("CartPole-v1", run_dir=run_dir, **settings)


def test_a_class_that_has_no_name_of_its_own_is_refused() -> None:
    class Local(Several):
        pass

    with pytest.raises(UserError, match="top level of a module"):
        freerun.train("CartPole-v1", mode=Local)


@pytest.mark.parametrize("setting", ["algo", "mode"])
def test_a_folder_from_elsewhere_does_not_import_what_it_names(
    setting: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even to look what it is: importing is running."""
    freerun.train("CartPole-v1", **SMALL, mode="sequential", run_dir=run_dir)
    trap, mark = tmp_path / "freerun_trap.py", tmp_path / "mark"
    trap.write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in [run_dir / "config.json", *run_dir.glob("checkpoints/*/state.json")]:
        text = path.read_text()
        before = '"ppo"' if setting == "algo" else '"sequential"'
        assert before in text
        path.write_text(text.replace(before, '"freerun_trap:Trap"'))
    folder = str(run_dir)
    for words in (
        ["train", "--config", f"{folder}/config.json", "--run-dir", str(tmp_path / "again")],
        ["train", "--config", f"{folder}/config.json", "--mode", "auto"],
        ["train", "--resume", folder, "--total-steps", "800"],
        ["train", "--resume", folder, "--mode", "pipes"],
        ["replay", folder],
        ["eval", folder],
    ):
        assert main(words) == 2, words
        assert not mark.exists(), words
        assert "freerun_trap:Trap" in capsys.readouterr().err or "--resume" in words  # its checksum is wrong anyway
