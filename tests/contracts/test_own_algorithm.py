"""An algorithm that is defined here and nowhere in freerun: every command knows it by its traits, or refuses it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import freerun
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.core import AlgorithmTraits, AnySegment, Demand, EnvSpec, LearnerGroup, Metrics, UserError
from freerun.run.replay_run import replay
from freerun.settings import registry
from freerun.settings.registry import AlgorithmEntry
from freerun.tools.cli.main import main
from freerun.tools.probe import auto_mode, measure

ENV = "toy_envs:OneBit"
SMALL: dict[str, Any] = {"episodes_per_update": 4, "total_episodes": 16, "quiet": True}


@dataclass(frozen=True)
class DriftConfig:
    episodes_per_update: int | None = 4
    """Whole episodes between two changes."""
    batch_rows: int = 8
    """Something that --adapt may raise."""
    step_size: float = 0.01
    """How far the weights move."""


class Undeclared:
    """It adds up the rewards and lets the weights drift. It declares no traits: they follow from its settings."""

    Config = DriftConfig

    def __init__(
        self,
        env: EnvSpec,
        config: DriftConfig,
        seed: int,
        device: str,
        deterministic: bool,
        peers: LearnerGroup | None = None,
    ):
        self.config = config
        self.policy = MLPActor(ActorSpec.of(env, (4,), "tanh"), scalar_actions=True, batch_invariant=deterministic)
        self.policy.weights[:] = np.random.default_rng(seed).normal(size=self.policy.weights.shape)
        self._total, self._num_episodes, self.num_reconfigured = 0.0, 0, 0

    def demand(self) -> Demand:
        return Demand(episodes=max(0, (self.config.episodes_per_update or 1) - self._num_episodes))

    def observe(self, segments: Sequence[AnySegment]) -> None:
        self._num_episodes += len(segments)
        self._total += sum(float(segment.reward.sum()) for segment in segments)

    def update(self, version: int, progress: float) -> Metrics:
        self.policy.weights += np.float32(self.config.step_size * self._total)
        self._num_episodes = 0
        return {"total_reward": self._total}

    def reconfigured(self) -> None:
        self.num_reconfigured += 1

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.policy.weights.copy(), "total": self._total, "episodes": self._num_episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.weights[:] = state["weights"]
        self._total, self._num_episodes = float(state["total"]), int(state["episodes"])


class Drift(Undeclared):
    traits = AlgorithmTraits(
        on_policy=True,
        action_spaces=(spaces.Discrete,),
        default_max_lag=2,
        counts_episodes=True,
        minibatch_setting="batch_rows",
        console_line=lambda step, metrics: f"[Drift] step={step} total={metrics['total_reward']:.0f}",
    )


NAME = f"{__name__}:Drift"


def test_it_trains_in_every_kind_of_mode_resumes_and_replays(run_dir: Path) -> None:
    result = freerun.train(ENV, algo=Drift, mode="pipes", num_workers=2, run_dir=run_dir, **SMALL)
    assert result.summary["episodes"] >= 16
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["algo"], config["max_lag"]) == (NAME, 2)
    assert freerun.resume(run_dir, total_episodes=32).summary["episodes"] >= 32
    assert replay(run_dir).is_same
    weights = [
        freerun.train(
            ENV, algo=Drift, mode=mode, deterministic=True, run_dir=run_dir.with_name(mode), **SMALL
        ).policy.weights
        for mode in ("sequential", "freerun")
    ]
    np.testing.assert_array_equal(*weights)


def test_its_line_is_on_the_console_and_the_classic_display_counts_its_episodes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", ENV, "--algo", NAME, "--mode", "sequential", "--total-episodes", "8"]
    assert main([*words, "--display", "lines", "--run-dir", str(run_dir)]) == 0
    assert "[Drift] step=" in capsys.readouterr().err
    assert main([*words, "--display", "classic", "--run-dir", str(run_dir.with_name("classic"))]) == 0
    assert "Collecting 4 episodes..." in capsys.readouterr().out


def test_auto_probes_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, seconds in (("PLAY_SECONDS", 0.3), ("RACE_SECONDS", 0.1), ("MODE_SECONDS", 0.1), ("UPDATE_SECONDS", 0.1)):
        monkeypatch.setattr(measure, name, seconds)
    monkeypatch.setattr(auto_mode, "candidates", lambda: ["pipes", "sequential"])
    result = freerun.train(ENV, algo=Drift, mode="auto", run_dir=run_dir, **SMALL)
    assert result.summary["mode"] in ("pipes", "sequential")


def test_adapt_moves_what_it_declares_and_nothing_else(run_dir: Path) -> None:
    settings = {**SMALL, "total_episodes": 200, "adapt": True, "adapt_max_workers": 2, "adapt_window": 0.05}
    result = freerun.train(
        ENV, algo=Drift, mode="pipes", num_workers=1, adapt_max_minibatch=16, run_dir=run_dir, **settings
    )
    assert 8 <= result.summary["adapted"]["minibatch"] <= 16
    with pytest.raises(UserError, match="--adapt cannot move Drift's ratio of updates"):
        freerun.train(
            ENV, algo=Drift, mode="pipes", adapt_min_update_ratio=1.0, run_dir=run_dir.with_name("ratio"), **settings
        )


def test_a_line_in_the_registry_puts_it_on_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = AlgorithmEntry(NAME, f"{__name__}:DriftConfig", "lets the weights drift")
    monkeypatch.setitem(registry.ALGORITHMS, "drift", entry)
    assert main(["list"]) == 0
    assert "drift lets the weights drift" in " ".join(capsys.readouterr().out.split())
    assert registry.make_config({"env": ENV, "algo": "drift", "step_size": 0.5}).algorithm.step_size == 0.5


@pytest.mark.parametrize(
    ("env", "settings", "sentence"),
    [
        ("Pendulum-v1", {}, "needs actions in a Discrete, not Box.*: choose --algo ppo or sac or fastsac or mbpo"),
        (ENV, {"mode": "batch"}, "--episodes-per-update needs whole episodes"),
        (ENV, {"steps_per_update": 10}, "unknown setting 'steps_per_update'"),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_traits(
    env: str, settings: dict[str, Any], sentence: str, run_dir: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        freerun.train(env, algo=Drift, run_dir=run_dir, **settings)
    assert not run_dir.exists()


def test_a_class_without_traits_gets_those_that_its_settings_suggest() -> None:
    traits = registry.find_algorithm(f"{__name__}:Undeclared").traits
    assert traits == AlgorithmTraits(counts_episodes=True)
    declared = dataclasses.asdict(registry.find_algorithm(NAME).traits)
    assert declared["default_max_lag"] == 2
