"""`--device auto` takes the device on which updates are faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freerun.settings.config import AnyConfig
from freerun.settings.presets import PRESETS
from freerun.settings.registry import make_config
from freerun.tools.probe import device_choice
from freerun.tools.probe.update_costs import time_updates

LIGHT: dict[str, Any] = {"num_workers": 1, "steps_per_update": 64, "num_epochs": 1, "hidden_sizes": (8,)}


def config(**settings: Any) -> AnyConfig:
    light = LIGHT if "algo" not in settings else {}
    return make_config({"env": "CartPole-v1", "device": "auto", **light, **settings})


def test_the_faster_of_two_devices_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is one kind of device here, so both trials are real and only their clocks differ."""

    def slower_first(*of: Any) -> Any:
        first, second = time_updates(*of)
        return type(first)(**{**vars(first), "seconds": second.seconds * 10}), second

    monkeypatch.setattr(device_choice, "SECONDS", 0.05)
    monkeypatch.setattr(device_choice, "time_updates", slower_first)
    chosen = device_choice.faster_of(config(), ("cpu:0", "cpu"))
    assert chosen.device == "cpu"
    said = capfd.readouterr().err
    assert said.startswith("--device auto: an update takes ")
    assert said.endswith(" ms on cpu; the learner uses cpu\n")


def test_the_fast_learner_needs_no_trial() -> None:
    for learner in ("fast", "numpy"):
        assert device_choice.faster_of(config(learner=learner), ("cpu", "cuda")).device == "cpu"


@pytest.mark.parametrize("preset", ["mbpo-hopper", "mbpo-small"])
def test_mbpo_takes_a_gpu_without_a_trial(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first update took two minutes on a CPU, in silence."""
    given = make_config({"env": "Hopper-v5", **PRESETS[preset].settings, "device": "auto"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_choice, "time_updates", lambda *of: pytest.fail("updates were tried"))
    assert device_choice.choose_device(given).device == "cuda"


def test_a_trial_is_needed_where_gradient_steps_are_not_recorded_or_gradients_are_a_cpus() -> None:
    assert device_choice.gains_from_gpu(config(env="Pendulum-v1", algo="sac"))
    for setting in ({"acceleration": "none"}, {"learner": "fast"}, {"learner": "numpy"}):
        assert not device_choice.gains_from_gpu(config(env="Pendulum-v1", algo="sac", **setting))
    assert not device_choice.gains_from_gpu(config())  # PPO


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_tried() -> None:
    given = config()
    assert device_choice.choose_device(given) is given


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_network_learns_on_the_cpu() -> None:
    assert device_choice.choose_device(config(minibatch_size=16)).device == "cpu"
