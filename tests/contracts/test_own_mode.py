"""A mode that is defined here and nowhere in freerun: every command knows it by its traits, or refuses it by them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    EnvFactory,
    FloatArray,
    HandedOver,
    ModeOptions,
    ModeTraits,
    Pacing,
    Policy,
    Predictor,
    ProbeModel,
    Segment,
    StartPoint,
    Tunable,
    UserError,
)
from freerun.run.replay_run import replay
from freerun.settings import registry
from freerun.settings.registry import ModeEntry, find_mode
from freerun.tools.bench.bench_cases import prepare, run_job
from freerun.tools.bench.bench_options import BenchOptions
from freerun.tools.cli.main import main
from freerun.tools.probe import auto_mode, measure
from freerun.tools.probe.forecast import Forecast

ENV = "toy_envs:OneBit"
SMALL: dict[str, Any] = {"steps_per_update": 100, "num_epochs": 1, "hidden_sizes": (8,), "quiet": True}


@dataclass(frozen=True)
class PostOptions(ModeOptions):
    num_stamps: int = 1
    """A setting that only this mode has."""


class Post:
    """A mode that hands every episode over by post."""

    traits = ModeTraits(
        aliases=("mail",),
        options=PostOptions,
        resizable=frozenset({"num_workers"}),
        preference=50,
        followers=None,
        probe=ProbeModel(Predictor.SCHEDULED_UNITS),
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, options: PostOptions):
        assert options.num_stamps > 0
        self._workers = find_mode("pipes").load()(factory, policy, settings)

    @property
    def num_workers(self) -> int:
        return int(self._workers.num_workers)

    def publish(self, weights: FloatArray, version: int) -> None:
        self._workers.publish(weights, version)

    def collect(self, demand: Demand) -> list[Segment]:
        segments: list[Segment] = self._workers.collect(demand)
        return segments

    def counts(self) -> Counts:
        counts: Counts = self._workers.counts()
        return counts

    def renew(self, start: StartPoint) -> None:
        self._workers.renew(start)

    def tunables(self) -> list[Tunable]:
        tunables: list[Tunable] = self._workers.tunables()
        return tunables

    def close(self) -> None:
        self._workers.close()


class Careless(Post):
    """It declares what it cannot do."""

    traits = ModeTraits(
        options=PostOptions, hands_over=HandedOver.SEGMENTS, pacing=Pacing.DROPS_STEPS, deterministic=False
    )


class Orderly(Post):
    traits = ModeTraits(options=PostOptions, pacing=Pacing.TAKES_TURNS)


NAME = f"{__name__}:Post"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> str:
    """One line in the registry makes it one of freerun's own."""
    monkeypatch.setitem(registry.MODES, "post", ModeEntry(NAME))
    return "post"


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, seconds in (("PLAY_SECONDS", 0.3), ("RACE_SECONDS", 0.1), ("MODE_SECONDS", 0.1), ("UPDATE_SECONDS", 0.1)):
        monkeypatch.setattr(measure, name, seconds)


def test_it_trains_resumes_and_replays_and_learns_what_the_reference_learns(run_dir: Path) -> None:
    settings = {**SMALL, "total_steps": 200, "deterministic": True}
    own = freerun.train(ENV, mode=Post, num_workers=2, num_stamps=3, run_dir=run_dir, **settings)
    reference = freerun.train(ENV, mode=registry.reference_mode(), run_dir=run_dir.with_name("one"), **settings)
    np.testing.assert_array_equal(own.policy.weights, reference.policy.weights)
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["mode"], config["num_stamps"], config["max_lag"]) == (NAME, 3, 0)
    assert freerun.resume(run_dir, total_steps=400).summary["env_steps"] >= 400
    assert replay(run_dir).is_same


def test_a_run_changes_to_it_and_back(run_dir: Path) -> None:
    freerun.train(ENV, mode="sequential", run_dir=run_dir, total_steps=100, **SMALL)
    assert freerun.resume(run_dir, total_steps=200, mode=Post, num_workers=2).summary["mode"] == NAME
    assert freerun.resume(run_dir, total_steps=300, mode="pipes").summary["num_workers"] == 2


def test_a_probe_chooses_its_number_of_workers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-workers", "auto", "--steps-per-update", "100", "--total-steps", "100", "--run-dir", str(run_dir)]
    assert main(["train", ENV, "--mode", NAME, *words]) == 0
    assert f"auto: {NAME} with" in capsys.readouterr().err


def test_a_line_in_the_registry_makes_it_a_choice_of_auto_and_of_list(
    registered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list"]) == 0
    assert "post        A mode that hands every episode over by post." in capsys.readouterr().out
    assert registry.mode_name({"env": ENV, "mode": "mail"}) == registered
    assert registered in auto_mode.candidates()
    probe, _ = auto_mode.look(
        [registered, registry.reference_mode()],
        lambda mode: registry.make_config({"env": ENV, "mode": mode, **SMALL}),
        fresh=True,
        say=lambda doing: None,
    )
    assert {found.mode for found in probe.forecasts} == {registered, registry.reference_mode()}
    assert auto_mode.pick([Forecast(mode, 2, 100.0) for mode in (registered, "sequential", "pipes")]).mode == ("pipes")


def test_adapt_moves_what_it_declares(run_dir: Path) -> None:
    settings = {**SMALL, "adapt": True, "adapt_window": 0.05, "total_steps": 2000}
    result = freerun.train(ENV, mode=Post, num_workers=1, adapt_max_workers=2, run_dir=run_dir, **settings)
    assert set(result.summary["adapted"]) == {"num_workers"}
    assert result.summary["adapted"]["num_workers"] in (1, 2)


@pytest.mark.usefixtures("preloaded_bench_jobs")
def test_a_bench_measures_it_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}:{here.parents[1] / 'src'}")
    label = f"{NAME}:num_stamps=2"
    results = prepare(BenchOptions(ENV, f"sequential,{label}", "2", seconds=0.1))
    case = results.case(label, 2)
    assert case is not None
    job = results.job(replace(case, steps_per_update=40))
    assert (job.mode, job.settings, job.config()["num_workers"]) == (NAME, {"num_stamps": 2}, 2)
    outcome = run_job(job, most_seconds=120.0)
    assert outcome.figures is not None, outcome
    assert outcome.figures["steps_per_second"] > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": Post, "num_learners": 2, "num_workers": 2}, "serves one learner: leave --num-learners out"),
        ({"mode": Careless, "deterministic": True}, "cannot be --deterministic.*choose --mode freerun"),
        ({"mode": Careless, "max_lag": 1}, "never waits, so it cannot keep to a --max-lag: leave it out, or choose"),
        ({"mode": Careless, "num_workers": "auto"}, "a probe cannot predict --mode .*:Careless, which declares no mod"),
        ({"mode": Careless, "adapt": True}, "--adapt finds nothing to move in --mode .*:Careless"),
        ({"mode": Orderly, "max_lag": 1}, "collects and learns in turns, so --max-lag must be 0"),
        ({"mode": Post, "adapt": True, "adapt_max_queue_size": 9}, "--adapt-max-queue-size bounds nothing"),
        ({"mode": Post, "queue_priority": "td-error"}, "belongs to --mode continuous.*has --num-stamps"),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_traits(settings: dict[str, Any], sentence: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        freerun.train(ENV, run_dir=run_dir, **settings)
    assert not run_dir.exists()
