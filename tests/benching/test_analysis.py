"""Rows, limits and sentences, by numbers worked out by hand."""

from __future__ import annotations

import pytest
from bench_results import bare, case, results

from freerun.benching import analysis
from freerun.benching.results import Case


def test_a_row_relates_a_mode_to_sequential_and_to_both_limits() -> None:
    found = results(case("sequential", 1, 80, 80), case("freerun", 10, 890, 900, 910), case("sync", 10, 300, 310))
    best, second, third = analysis.rows(found, 10)
    assert [row.label for row in (best, second, third)] == ["freerun", "sync", "sequential"]
    assert best.speed_up == pytest.approx(900 / 80)
    assert best.of_bare == pytest.approx(0.9)
    assert best.of_cores == pytest.approx(0.9)  # ten environments of 100 steps/s each
    assert best.many_episodes_seconds == pytest.approx(1.0 + 100_000 / 9.0)
    assert [row.standing for row in (best, second, third)] == ["fastest", "slower", "slower"]


def test_the_cores_limit_environments_that_compute() -> None:
    found = results(case("freerun", 10, 150))
    found.cases[0].runs = [bare(100) | {"cpu_seconds_per_step": 0.01}]
    limit = analysis.limits(found, 10)
    assert limit is not None
    assert limit.cores == pytest.approx(200)  # two cores, 10 ms of one for a step


def test_a_difference_within_the_noise_is_not_called() -> None:
    found = results(case("sequential", 1, 80, 81), case("freerun", 10, 900, 910), case("pipes", 10, 895, 905))
    best, second, _ = analysis.rows(found, 10)
    assert (best.standing, second.standing) == ("fastest", "as fast")
    assert "no difference to pipes (900) can be called" in analysis.verdict(found, 10)


def test_a_clear_difference_is_called() -> None:
    found = results(case("sequential", 1, 80, 81), case("freerun", 10, 900, 910), case("pipes", 10, 700, 710))
    assert analysis.verdict(found, 10) == (
        "With 10 workers freerun is the fastest: 905 steps/s, 90 % of the bare limit, 11.2 × sequential; "
        "1.28 × the next, pipes."
    )


def test_a_noisy_machine_calls_less() -> None:
    found = results(case("freerun", 10, 900, 910), case("pipes", 10, 700, 710))
    found.cases[1].runs = [bare(700), bare(1000)]  # 850 ± 18 %
    assert "no difference to pipes (705) can be called" in analysis.verdict(found, 10)
    noise = analysis.machine_noise(found)
    assert noise is not None
    assert noise.word == "very noisy"
    assert "varied by 35 % between its runs" in str(noise)


def test_a_speed_up_within_the_noise_is_none() -> None:
    found = results(case("sequential", 1, 100, 101), case("sync", 10, 101, 103))
    sync, sequential = analysis.rows(found, 10)
    assert (sync.label, sync.speed_up_called) == ("sync", False)
    assert not sequential.speed_up_called


def test_where_no_episode_has_ended_their_length_in_the_bare_limit_counts() -> None:
    found = results(case("batch", 10, 50, episodes_per_second=0.0))
    (row,) = analysis.rows(found, 10)
    assert row.episodes == pytest.approx(0.5)


def test_what_is_missing_is_said_once() -> None:
    ray = Case("ray", 10, problem="ray is not installed")
    found = results(case("freerun", 10, 900), case("pipes", 10, 800), ray, Case("sync", 10))
    assert analysis.left_out(found) == [
        "freerun, pipes: measured only once: the time was up",
        "ray: left out: ray is not installed",
        "sync: left out: the time was up; --max-minutes gives it more, --resume goes on",
    ]


@pytest.mark.parametrize(
    ("label", "flags"),
    [
        ("freerun:segment_steps=25", "--mode freerun --num-workers 10 --segment-steps 25"),
        ("continuous", "--mode continuous --num-collectors 10 --num-envs 10"),
        ("batch", "--mode batch --num-envs 10"),
    ],
)
def test_the_command_trains_the_same_way(label: str, flags: str) -> None:
    from freerun.registry import make_config

    found = results(case(label, 10, 900))
    command = analysis.command(found, analysis.rows(found, 10)[0])
    assert command == f"freerun train Toy-v0 {flags}"
    words = flags.replace("--", "").replace("-", "_").split()
    settings = {
        name: int(value) if value.isdecimal() else value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    make_config({"env": "CartPole-v1", **settings})
