"""`--device auto` takes the device on which updates are faster."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from freerun.algorithms.learners.compiled_kernel import compiled_kernel
from freerun.algorithms.ppo.ppo import PPO
from freerun.core import Metrics
from freerun.run.learner_threads import first_threads
from freerun.settings.config import AnyConfig
from freerun.settings.defaults import complete
from freerun.settings.factories import limit_threads, make_algorithm, make_factory
from freerun.settings.presets import PRESETS
from freerun.settings.registry import make_config
from freerun.tools.probe import device_choice
from freerun.tools.probe.measure import stand_in_for
from freerun.tools.probe.update_costs import time_updates

LIGHT: dict[str, Any] = {"num_workers": 1, "steps_per_update": 64, "num_epochs": 1, "hidden_sizes": (8,)}


def config(**settings: Any) -> AnyConfig:
    light = LIGHT if "algo" not in settings else {}
    return make_config({"env": "CartPole-v1", "device": "auto", **light, **settings})


def test_the_faster_of_two_devices_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is one kind of device here, so both trials are real and only their clocks differ."""

    def slower_first(config: Any, stand_in: Any, seconds: float, has_threads: bool) -> Any:
        first, second = time_updates(config, stand_in, seconds, has_threads)
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


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
@pytest.mark.parametrize(("has_threads", "expected"), [(True, 3), (False, 1)])
def test_a_cpu_is_tried_with_the_threads_that_a_run_begins_with(
    monkeypatch: pytest.MonkeyPatch, has_threads: bool, expected: int
) -> None:
    kernel = compiled_kernel()
    assert kernel is not None
    monkeypatch.setattr("freerun.tools.probe.update_costs.usable_cores", lambda: range(16))
    seen: set[int] = set()
    update = PPO.update

    def watched(self: PPO, version: int, progress: float) -> Metrics:
        seen.add(kernel.num_threads())
        return update(self, version, progress)

    monkeypatch.setattr(PPO, "update", watched)
    given = complete(config(num_workers=12, steps_per_update=512, minibatch_size=256, device="cpu"))
    time_updates([given], stand_in_for(make_factory(given).spec, 100), 0.05, has_threads)
    assert seen == {expected}
    assert kernel.num_threads() == 1


def test_a_number_of_threads_that_was_given_is_tried() -> None:
    given = complete(config(learner_threads=5))
    algorithm = make_algorithm(given, make_factory(given))
    assert first_threads(given, algorithm, num_workers=1, num_cores=2) == 5
    limit_threads(1, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_tried() -> None:
    given = config()
    assert device_choice.choose_device(given) is given


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_network_learns_on_the_cpu() -> None:
    assert device_choice.choose_device(config(minibatch_size=16)).device == "cpu"
