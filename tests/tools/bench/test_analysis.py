"""Rows, limits and sentences of the reports, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest
from bench_results import bare, case, results

from freerun.settings.registry import flatten_config, make_config
from freerun.tools.bench import analysis, text_report
from freerun.tools.bench.html_report import page
from freerun.tools.bench.results import Case, Results
from freerun.tools.cli.train_flags import Flags


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
    assert "its difference to pipes (900) lies within the noise" in analysis.verdict(found, 10)


def test_a_clear_difference_is_called() -> None:
    found = results(case("sequential", 1, 80, 81), case("freerun", 10, 900, 910), case("pipes", 10, 700, 710))
    assert analysis.verdict(found, 10) == (
        "With 10 workers freerun is the fastest: 905 steps/s, 90 % of the bare limit, 11.2 × sequential; "
        "1.28 × the next, pipes."
    )


def test_a_noisy_machine_calls_less() -> None:
    found = results(case("freerun", 10, 900, 910), case("pipes", 10, 700, 710))
    found.cases[1].runs = [bare(700), bare(1000)]  # 850 ± 18 %
    assert "its difference to pipes (705) lies within the noise" in analysis.verdict(found, 10)
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
        "sync: left out: the time was up; --max-minutes gives it more, --resume continues",
    ]


@pytest.mark.parametrize(
    "label",
    [
        "sequential",
        "sync",
        "pipes",
        "freerun",
        "freerun:segment_steps=25:envs_per_worker=4:pin_workers=true",
        "continuous:queue_priority=rare-lengths",
        "batch:max_queue_size=3",
    ],
)
def test_the_command_trains_with_the_settings_that_were_measured(label: str) -> None:
    """The printed words are parsed as `freerun train` parses them."""
    num_workers = 1 if label == "sequential" else 10
    options = {"env_args": {"task": "to hover", "mean_seconds": 0.5}, "max_episode_steps": 77, "num_epochs": 7}
    found = results(case(label, num_workers, 900), **options)
    program, subcommand, *words = shlex.split(analysis.command(found, analysis.rows(found, 10)[0]))
    assert (program, subcommand) == ("freerun", "train")
    measured = found.job(found.cases[-1]).config()
    trained = flatten_config(Flags.read(words, None).config())
    differing = {"learning_rate", "quiet"}
    expected = flatten_config(make_config(measured))
    assert {name: value for name, value in trained.items() if name not in differing} == {
        name: value for name, value in expected.items() if name not in differing
    }
    assert trained["num_epochs"] == 7
    assert trained["minibatch_size"] == 1000
    assert trained["learning_rate"] is None, "a run that is to learn something takes the default"


def test_only_a_clear_difference_is_recommended() -> None:
    clear = results(case("sequential", 1, 80, 81), case("freerun", 10, 900, 910), case("pipes", 10, 700, 710))
    sentence, command = analysis.recommendation(clear)
    assert sentence.startswith("To train in the fastest mode")
    assert command is not None
    assert "--mode freerun --episodes-per-update 10 " in command
    unclear = results(case("sequential", 1, 80, 81), case("freerun", 10, 900, 910), case("pipes", 10, 895, 905))
    assert analysis.recommendation(unclear) == (
        "Nothing is recommended: freerun with 10 workers came out highest, but its difference to "
        "pipes with 10 workers lies within the noise.",
        None,
    )
    for report in (text_report.markdown(unclear), page(unclear, Path("nowhere"))):
        assert "its difference to pipes (900) lies within the noise" in report
        assert "freerun train" not in report
        assert "fastest way" not in report
    assert analysis.recommendation(results(case("freerun", 10, 900)))[1] is None, "there is nothing to compare it with"


def two_numbers_of_workers() -> Results:
    found = results(case("freerun", 10, 900, 910), case("pipes", 10, 700, 710))
    found.options = dataclasses.replace(found.options, modes="freerun,pipes", workers="10,20")
    found.cases += [Case("bare", 20, 0, [bare(1980), bare(2020)]), case("freerun", 20, 1500, 1600)]
    return found


def test_charts_are_drawn_by_workers_in_colours_of_the_page() -> None:
    report = page(two_numbers_of_workers(), Path("nowhere"))
    assert report.count('<svg class="chart"') == 2
    for tooltip in ("freerun, 10 workers: 905", "freerun, 20 workers: 78 %", "bare limit, 20 workers: 2,000"):
        assert f"<title>{tooltip}</title>" in report
    charts = re.findall(r"<svg.*?</svg>", report, re.DOTALL)
    assert all("stroke: var(--line-0)" in chart for chart in charts)
    assert "stroke: var(--limit)" in charts[0]
    assert not re.search("#[0-9a-f]{6}(?![0-9a-f])", "".join(charts)), "a colour that a dark page does not change"
    assert "they need matplotlib" not in report


def test_without_matplotlib_the_report_keeps_its_tables_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = page(two_numbers_of_workers(), Path("nowhere"))
    assert report.count("<table>") == 2
    assert "<svg" not in report
    assert "the charts and the timelines: they need matplotlib (pip install &#x27;freerun[plot]&#x27;)" in report


def test_ways_with_different_numbers_of_workers_are_told_apart_too() -> None:
    found = results(case("freerun", 10, 900, 910), case("pipes", 10, 700, 710))
    found.options = dataclasses.replace(found.options, workers="10,20")
    found.cases += [Case("bare", 20, 0, [bare(990), bare(1010)]), case("freerun", 20, 905, 912)]
    sentence, command = analysis.recommendation(found)
    assert command is None
    assert (
        "freerun with 20 workers came out highest, but its difference to freerun with 10 workers lies within the noise"
        in sentence
    )
