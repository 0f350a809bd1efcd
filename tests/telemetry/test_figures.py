"""Key figures have targets, and advice follows from them."""

from __future__ import annotations

import pytest

from freerun.settings.registry import ALGORITHMS, situation
from freerun.telemetry.advice import FIGURES, RecentRecords, Situation, advise, mean_record

FINE = {
    "workers_busy_share": 0.95,
    "workers_waiting_for_slot_share": 0.05,
    "learner_waiting_share": 0.1,
    "cpu_percent": 95.0,
    "queue_percent": 60.0,
}


def test_nothing_is_said_where_all_is_well() -> None:
    assert advise(FINE, Situation()) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers_waiting_for_slot_share": 0.4}, "workers wait 40% for slots: learning takes 1.7 × as long"),
        ({"workers_waiting_for_weights_share": 0.6}, "workers wait 65% for weights: learning takes 2.9 × as long"),
        ({"workers_waiting_for_others_share": 0.5}, "try --mode freerun"),
        ({"workers_restarting_share": 0.1}, "workers spend 10% of their time restarting"),
        ({"workers_waiting_for_weights_share": 0.3, "learner_waiting_share": 0.5}, "try a higher --max-lag"),
        ({"learner_waiting_share": 0.9, "cpu_percent": 30.0}, "the CPU is 30 % busy: try more --num-workers"),
        ({"queue_percent": 97.0}, "queue 97 % (target 50–80 %): the learner takes less"),
        ({"queue_percent": 3.0}, "queue 3 % (target 50–80 %): collectors bring less"),
        ({"gpu_percent": 20.0}, "GPU 20 % (target above 90 %)"),
        ({"cpu_percent": 50.0}, "CPU 50 % (target above 80 %): cores are idle"),
    ],
)
def test_what_holds_a_run_up_is_said_with_what_to_try(changes: dict[str, float], said: str) -> None:
    advice = advise({**FINE, **changes}, Situation())
    assert advice is not None
    assert said in advice


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        (Situation(1), "larger minibatches"),
        (Situation(2), "larger minibatches"),  # 60 % of two workers are two
        (Situation(4), "larger minibatches, or 3 workers instead of 4, which would collect as much"),
        (Situation(1, work_flag="--num-epochs", work=10), "--num-epochs 6 instead of 10, or larger minibatches"),
        (
            Situation(1, work_flag="--updates-per-step", work=1, larger_minibatch_is_faster=False),
            "--updates-per-step 0.6 instead of 1",
        ),
        (
            Situation(1, has_idle_gpu=True),
            "larger minibatches, or --device auto, which measures whether the GPU is faster",
        ),
    ],
)
def test_only_what_is_there_is_advised(given: Situation, remedies: str) -> None:
    """A GPU is advised only if one is unused, and fewer workers only if there are several.

    The learner works all the time on what workers collect in 60 % of it, so it needs 1 / 0.6 = 1.7 times as long.
    """
    advice = advise({**FINE, "workers_waiting_for_slot_share": 0.4}, given)
    assert advice == f"workers wait 40% for slots: learning takes 1.7 × as long as collecting would; try {remedies}"


def test_a_network_that_is_slow_for_workers_is_told() -> None:
    """Two workers are busy for 0.95 * 2 seconds of a second, in which they make 400 steps: 4.75 ms for each."""
    record = {**FINE, "learner_waiting_share": 0.6, "steps_per_second": 400.0}
    advice = advise(record, Situation(2, act_seconds=0.004))
    assert advice is not None
    assert "the network takes 4.0 ms of the 4.8 ms of a worker's step: try a smaller --network" in advice
    assert "--mode sync --act-on-device" in advice
    assert advise(record, Situation(2, act_seconds=0.001)) is None
    assert advise({**record, "learner_waiting_share": 0.1}, Situation(2, act_seconds=0.004)) is None


def test_the_amount_of_learning_is_known_by_its_flag() -> None:
    settings = {"mode": "freerun", "num_workers": 2, "algo": "ppo", "num_epochs": 10}
    assert situation(settings).work_flag == "--num-epochs"
    assert situation(settings).work == 10.0
    assert situation({**settings, "algo": "sac", "updates_per_step": 0.5}).work_flag == "--updates-per-step"
    assert situation({**settings, "algo": "theirs:Algorithm"}).work_flag is None


def test_larger_minibatches_are_advised_only_where_they_spare_time() -> None:
    """PPO passes over a fixed number of rows. The others take a fixed number of gradient steps."""
    found = {name: situation({"algo": name}).larger_minibatch_is_faster for name in ALGORITHMS}
    assert [name for name, is_faster in found.items() if is_faster] == ["ppo"]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"mode": "freerun", "num_workers": 2}, "more --num-workers"),
        ({"mode": "continuous", "num_workers": 2}, "more --num-collectors"),
        ({"mode": "sequential", "num_workers": 1}, "--mode freerun, which has several workers"),
        ({"mode": "batch", "num_workers": 1}, "--mode freerun, which has several workers"),
        ({"mode": "batch", "num_workers": 1, "env": "freerun/RoughDrone-v0"}, "more --num-envs"),
        ({"mode": "theirs:Mode", "num_workers": "many"}, "more --num-workers"),
    ],
)
def test_more_workers_are_asked_for_by_a_flag_that_the_mode_has(settings: dict[str, object], more: str) -> None:
    found = situation({"env": "CartPole-v1", **settings})
    assert found.more_workers == more
    advice = advise({**FINE, "cpu_percent": 30.0}, found)
    assert advice is not None
    assert advice.endswith(f"cores are idle; try {more}")


def test_targets_are_the_documented_ones() -> None:
    targets = {figure.label: figure.target for figure in FIGURES.values() if figure.target}
    assert targets == {"queue": "50–80 %", "buffer": "70–90 %", "GPU": "above 90 %", "CPU": "above 80 %"}


def test_advice_is_about_the_last_updates_not_one() -> None:
    recent = RecentRecords(Situation())
    assert recent.advice() is None
    for _ in range(9):
        recent.write(0, FINE)
    recent.write(0, {**FINE, "workers_waiting_for_slot_share": 1.0})
    assert recent.advice() is None  # 14.5 % on average
    for _ in range(2):
        recent.write(0, {**FINE, "workers_waiting_for_slot_share": 1.0})
    assert recent.advice() is not None


def test_a_mean_is_over_those_that_have_the_figure() -> None:
    assert mean_record([{"a": 1.0, "b": None}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0}


def test_one_worker_is_advised_in_the_singular() -> None:
    advice = advise({**FINE, "workers_waiting_for_slot_share": 0.8}, Situation(4))
    assert advice is not None
    assert advice.endswith("or 1 worker instead of 4, which would collect as much")
