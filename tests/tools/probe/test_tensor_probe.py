"""Probes of environments that are tensors: the model by hand, and real probes of a few of them on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy_tensors import Counting

import freerun
from freerun.core import Predictor, UserError
from freerun.settings.registry import MODES, make_config
from freerun.tools.cli.main import main
from freerun.tools.probe import auto_mode, probe_cache, tensor_trial
from freerun.tools.probe.candidates import Search
from freerun.tools.probe.measurement import TensorMeasurement, TensorVector, UpdateCost
from freerun.tools.probe.tensor_forecast import forecast_tensors, overlapped
from freerun.tools.probe.update_costs import learner_of

ENV = "freerun/RoughDrone-v0"
LIGHT: dict[str, Any] = {"num_epochs": 1, "minibatch_size": 512, "hidden_sizes": (8,)}
LIGHT_FLAGS = ["--num-epochs", "1", "--minibatch-size", "512", "--hidden-sizes", "8"]
TENSOR_MODES = {name for name, entry in MODES.items() if entry.traits.tensors is not None}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("COLLECT_SECONDS", "LEARN_SECONDS", "OVERLAP_SECONDS"):
        monkeypatch.setattr(tensor_trial, name, 0.02)


def search_of(given: tuple[str, ...] = (), **settings: Any) -> Search:
    return Search({mode: make_config({"env": ENV, "mode": mode, **settings}) for mode in sorted(TENSOR_MODES)}, given)


# ---------------------------------------------------------------------------------------------- the model


def test_both_at_once_by_hand() -> None:
    # Nobody is in the other's way: the slower one decides.
    assert overlapped(1.0, 2.0, 1.0, 1.0).steps_per_second == pytest.approx(1 / 2)
    assert overlapped(3.0, 2.0, 1.0, 1.0).steps_per_second == pytest.approx(1 / 3)
    # Each has half of its speed beside the other, so nothing is gained over turns.
    assert overlapped(1.0, 2.0, 0.5, 0.5).steps_per_second == pytest.approx(1 / 3)
    # Learning takes 2 s at 0.8 of its speed for as long as collecting takes (1 s / 0.5), and at full speed otherwise.
    found = overlapped(1.0, 2.0, 0.5, 0.8)
    assert found.steps_per_second == pytest.approx(1 / (2 + 2 * 0.2))
    # A collector that never waits is always beside the learner.
    assert overlapped(1.0, 2.0, 0.5, 0.8, never_waits=True).steps_per_second == pytest.approx(0.8 / 2)


def test_modes_collect_and_learn_in_turns_or_at_once_as_they_declare() -> None:
    search = search_of(num_envs=64)
    config = search.completed()["batch"]
    demand = {"steps": 1536, "episodes": 0, "whole_episodes": True}
    update = UpdateCost(demand, 1536, 1536 * 2e-5, config.algorithm.minibatch_size, 1536, learner_of(config))
    vectors = (TensorVector(64, 24, 1e-5),)
    measured = TensorMeasurement(vectors, (update,), 1.0, 1.0, 100.0, 0.1, False, 1.0)
    found = {entry.mode: entry for entry in forecast_tensors(measured, search)}
    assert set(found) == TENSOR_MODES
    for mode, entry in found.items():
        in_turns = MODES[mode].traits.takes_turns
        assert entry.speed == pytest.approx(1 / 3e-5 if in_turns else 1 / 2e-5)
        assert entry.num_envs == 64
    assert found["batch"].episodes_per_second == pytest.approx(500)
    no_lag = {entry.mode: entry for entry in forecast_tensors(measured, search_of(num_envs=64, max_lag=0))}
    assert no_lag["batch"].speed == pytest.approx(1 / 3e-5), "without lag they take turns"


def test_larger_vectors_are_candidates_as_far_as_the_run_has_steps_for_them() -> None:
    assert search_of(("num_envs",), num_envs=8).tensor_sizes() == [8]
    # In 100,000 steps there are 32 updates of 3,125: `continuous` hands over one step of 1,024 environments at a time.
    assert search_of().tensor_sizes() == [64, 256, 1024]
    # 32 updates of 24 steps of 4,096 environments are 3.1 million steps.
    modes = {found.mode for found in search_of(total_steps=5_000_000).tensor_candidates(4096)}
    assert modes == TENSOR_MODES


# ---------------------------------------------------------------------------------------------- real probes


def test_a_probe_of_tensors_predicts_every_mode_that_steps_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = [ENV, "--num-envs", "4", *LIGHT_FLAGS]
    assert main(["probe", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {entry["mode"] for entry in found["predictions"]} == TENSOR_MODES
    assert set(found["refused"]) == set(MODES) - TENSOR_MODES
    for entry in found["predictions"]:
        assert entry["steps_per_second"] > 0
        assert entry["num_envs"] == 4
    assert 0 < found["both_at_once"]["collect_share"] <= 1
    assert found["recommendation"]["command"].startswith(f"freerun train {' '.join(words)} --mode ")
    assert main(["probe", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("A step of 4 environments", "Doing both at once is worth", "predicted steps/s", "Recommended: "):
        assert word in text, text


def test_auto_trains_on_tensors_and_finds_the_probe_again(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"num_envs": 4, "total_steps": 200, "steps_per_update": 96, **LIGHT}
    result = freerun.train(ENV, mode="auto", run_dir=run_dir, **settings)
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["mode"], config["num_envs"]) == (result.summary["mode"], 4)
    assert config["mode"] in TENSOR_MODES
    assert f"auto: {config['mode']} with 1 worker × 4 environments" in capsys.readouterr().err
    freerun.train(ENV, mode="auto", run_dir=run_dir.with_name("again"), **settings)
    assert "(from an earlier probe)" in capsys.readouterr().err


def test_larger_vectors_are_measured_while_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_trial, "STILL_PAYS", 0.0)  # the second one ends it
    found, configs = auto_mode.look(
        ["batch", "sync"],
        lambda mode: make_config({"env": ENV, "mode": mode, "total_steps": 10**7, **LIGHT}),
        fresh=True,
        say=lambda doing: None,
    )
    assert isinstance(found.measured, TensorMeasurement)
    assert {entry.num_envs for entry in found.forecasts} == {64, 256}
    assert {entry.settings["num_envs"] for entry in found.forecasts} == {64, 256}
    assert {update.update_steps for update in found.measured.updates} == {64 * 24, 256 * 24}
    assert TensorMeasurement.from_json(json.loads(json.dumps(found.measured.to_json()))) == found.measured
    assert probe_cache.find(Search(configs)) == found.measured


def test_environments_that_exist_already_are_probed_and_stay_open(run_dir: Path) -> None:
    env = Counting(4, "cpu", None, True)
    settings = {"total_steps": 200, "steps_per_update": 96, **LIGHT}
    result = freerun.train(env, mode="auto", run_dir=run_dir, **settings)
    assert result.summary["env_steps"] >= 200
    assert env.is_closed, "the run has closed it, and not the probe"
    assert not probe_cache.folder().exists(), "its name does not say what it is"


def test_a_mode_that_steps_each_by_itself_can_still_be_probed() -> None:
    """RoughDrone is a Gymnasium environment, too."""
    config = make_config({"env": ENV, "mode": "freerun"})
    auto_mode.check_mode("freerun", config)
    assert not Search({"freerun": config}).is_tensors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deterministic": True}, "environments that are tensors are cut"),
        ({"episodes_per_update": 3}, "needs whole episodes"),
        ({"max_episode_steps": 3}, "--max-episode-steps is not for environments that are tensors"),
    ],
)
def test_what_tensors_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        auto_mode.check_mode("sync", make_config({"env": ENV, "mode": "sync", **settings}))


def test_every_mode_that_steps_tensors_has_a_model_for_it() -> None:
    models = {mode: MODES[mode].traits.probe for mode in TENSOR_MODES}
    assert {model.predictor for model in models.values() if model} <= {
        Predictor.LOCKSTEP,
        Predictor.BATCHES,
        Predictor.DROPPING_QUEUE,
    }
