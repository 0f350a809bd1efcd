"""Several runs on the page of `freerun watch`, and what it says where there is nothing to draw."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from watch_page import opened, until
from watch_server import Server, watching, write_run

CHARTS = (
    "chart-return",
    "chart-steps",
    "chart-rates",
    "chart-shares",
    "chart-load",
    "chart-lag",
    "chart-losses",
    "timeline",
)


def write_whole_run(path: Path, num_workers: int, loss: float, **config: Any) -> Path:
    """With something to draw in every chart, and as many rows in its timeline as it has workers, and the learner's."""
    write_run(path, num_workers=num_workers, **config)
    record = {"return_mean": 1.0, "steps_per_second": 2.0, "episodes_per_second": 3.0, "updates_per_second": 4.0}
    record |= {"workers_busy_share": 0.5, "cpu_percent": 60.0, "value_loss": loss, "lag_share/0": 1.0}
    lines = [{"step": 100 * update, "update": update, "wall_seconds": float(update), **record} for update in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tracks = [*(f"worker {worker}" for worker in range(num_workers)), "learner"]
    head = {"tracks": tracks, "states": [], "began": 1e9}
    moment = {"at": 2.0, "blocks": [[track, 0.0, 0, 2.0] for track in range(len(tracks))]}
    (path / "timeline.jsonl").write_text(json.dumps(head) + "\n" + json.dumps(moment) + "\n")
    (path / "summary.json").write_text('{"outcome": "finished"}')
    return path


@pytest.fixture(scope="module")
def wide_and_narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("runs")
    now = time.time()
    for age, path in (
        (20, write_whole_run(folder / "narrow", 2, 0.25)),
        (10, write_whole_run(folder / "wide", 30, 0.75)),
    ):
        os.utime(path / "config.json", (now - age, now - age))
    with watching(folder) as server:
        yield server


def tick(page: Page, run: str) -> None:
    page.locator("#runs li", has_text=run).locator("input").click()


def num_rows(page: Page, number: int) -> None:
    until(page, f"document.getElementById('timeline').data?.[0]?.y?.length === {number}")


def test_the_timeline_covers_nothing_when_a_run_with_more_rows_is_unticked(
    browser: Browser, wide_and_narrow: Server
) -> None:
    with opened(browser, wide_and_narrow.url) as page:
        num_rows(page, 31)
        tick(page, "narrow")
        until(page, "document.getElementById('chart-return').data?.length === 2")
        tick(page, "wide")
        num_rows(page, 3)
        page.wait_for_timeout(500)
        painted = page.locator("#timeline .main-svg").first.bounding_box()
        card = page.locator("section", has=page.locator("#timeline")).last.bounding_box()
        assert painted is not None
        assert card is not None
        assert painted["height"] < 31 * 9
        assert painted["y"] + painted["height"] <= card["y"] + card["height"]
        tick(page, "wide")
        page.locator("#shown-runs button", has_text="wide").click()
        num_rows(page, 31)
        until(page, "document.querySelector('#timeline .main-svg').getBoundingClientRect().height >= 31 * 18")


def test_every_axis_has_a_title(browser: Browser, wide_and_narrow: Server) -> None:
    with opened(browser, wide_and_narrow.url) as page:
        num_rows(page, 31)
        titles = page.evaluate(
            "(charts) => charts.map((id) => { const { xaxis, yaxis } = document.getElementById(id).layout;"
            " return [xaxis.title?.text, yaxis.title?.text]; })",
            list(CHARTS),
        )
        assert all(x and y for x, y in titles), dict(zip(CHARTS, titles, strict=True))
        assert titles[0] == ["steps", "return of an episode"]
        page.locator("#x-axis").select_option("seconds")
        until(page, "document.getElementById('chart-return').layout.xaxis.title.text === 'seconds'")


def test_what_is_about_one_run_says_which_and_lets_one_choose(browser: Browser, wide_and_narrow: Server) -> None:
    with opened(browser, wide_and_narrow.url) as page:
        expect(page.locator("#title")).to_have_text("wide")
        tick(page, "narrow")
        expect(page.locator("#connection")).to_have_text("wide: finished")
        timeline = page.locator(".bar select")
        losses = page.locator("figcaption select")
        expect(timeline).to_have_value("wide")
        expect(losses).to_have_value("wide")
        expect(page.locator("h3", has_text="Ledger")).to_contain_text("of wide")
        losses.select_option("narrow")
        expect(page.locator("#title")).to_have_text("narrow")
        expect(page.locator("#connection")).to_have_text("narrow: finished")
        expect(page.locator(".bar select")).to_have_value("narrow")
        expect(page.locator("h3", has_text="Ledger")).to_contain_text("of narrow")
        num_rows(page, 3)
        until(page, "document.getElementById('chart-losses').data[0].y[0] === 0.25")
        page.locator("#shown-runs button", has_text="wide").click()
        num_rows(page, 31)
        until(page, "document.getElementById('chart-losses').data[0].y[0] === 0.75")
        tick(page, "wide")  # with one run left there is nothing to choose
        expect(page.locator("#title")).to_have_text("narrow")
        expect(page.locator("#shown-runs button")).to_have_count(0)
        expect(page.locator(".of-run select")).to_have_count(0)


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Five seeds of seven ways to train, begun two days ago, and one run alone, begun an hour ago."""
    folder = tmp_path_factory.mktemp("runs")
    now = time.time()
    for way in range(7):
        for seed in range(5):
            mode = "sync" if way == 0 else "freerun"
            path = write_run(folder / f"way{way}-{seed}", seed=seed, mode=mode, learning_rate=way / 100)
            os.utime(path / "config.json", (now - 172_900, now - 172_900 + way))
    os.utime(write_run(folder / "alone", env="Other-v0") / "config.json", (now - 3700, now - 3700))
    with watching(folder) as server:
        yield server


def test_seeds_are_a_group_with_a_tick_of_its_own(browser: Browser, many_runs: Server) -> None:
    with opened(browser, many_runs.url) as page:
        expect(page.locator("#num-runs")).to_have_text("36")
        expect(page.locator("#runs > li")).to_have_count(8)
        expect(page.locator("#runs > li").first.locator("time")).to_have_text("1 h")
        group = page.locator("#runs .group", has_text="way3…")
        expect(group).to_contain_text("5 seeds")
        expect(group).to_contain_text("learning_rate=0.03")
        expect(group.locator("time").first).to_have_text("2 d")
        expect(group.locator(".run").first).to_be_hidden()
        box = group.locator("input").first
        box.click()
        until(page, "document.getElementById('chart-return').data?.length === 6")
        group.locator(".toggle").click()
        expect(group.locator(".run input:checked")).to_have_count(5)
        group.locator(".run input").first.click()
        until(page, "document.getElementById('chart-return').data?.length === 5")
        assert box.evaluate("(box) => box.indeterminate")
        box.click()
        until(page, "document.getElementById('chart-return').data?.length === 6")
        box.click()
        until(page, "document.getElementById('chart-return').data?.length === 1")
        expect(page.locator("#title")).to_have_text("alone")


def test_runs_are_found_by_a_filter(browser: Browser, many_runs: Server) -> None:
    with opened(browser, many_runs.url) as page:
        page.locator("#filter").fill("SYNC seed 3")
        expect(page.locator("#num-runs")).to_have_text("1 of 36")
        expect(page.locator("#runs .run")).to_have_count(1)
        expect(page.locator("#runs .run")).to_contain_text("way0-3")
        page.locator("#runs .run input").click()
        until(page, "document.getElementById('chart-return').data?.length === 2")
        page.locator("#filter").fill("learning_rate=0.05")
        expect(page.locator("#runs .run")).to_have_count(5)
        page.locator("#filter").fill("nonsense")
        expect(page.locator("#runs-hint")).to_have_text("No run matches the filter.")
        page.locator("#filter").fill("")
        expect(page.locator("#runs > li")).to_have_count(8)


def test_more_runs_than_can_be_drawn_are_refused_with_a_sentence(browser: Browser, many_runs: Server) -> None:
    with opened(browser, many_runs.url) as page:
        for way in (1, 2, 3):  # with the one that is ticked at first: 16
            page.locator("#runs .group", has_text=f"way{way}…").locator("input").first.click()
        expect(page.locator("#runs-hint")).to_contain_text("At most 12 runs are drawn at once")
        expect(page.locator("#shown-runs button")).to_have_count(12)
        colors = page.evaluate(
            "[...document.querySelectorAll('#shown-runs .swatch')].map((each) => each.style.background)"
        )
        assert len(set(colors)) == 12


# ---------------------------------------------------------------------------------------------- where there is nothing


def begun(path: Path, **files: Any) -> Path:
    path.mkdir(parents=True)
    settings = {"env": "CartPole-v1", "algo": "ppo", "mode": "freerun", "seed": 0, "num_workers": 2}
    (path / "config.json").write_text(json.dumps(settings))
    later = (
        time.time() + 600
    )  # what has written nothing for 30 s is not taken to run any more: a busy machine may be slow
    os.utime(path / "config.json", (later, later))
    for name, content in files.items():
        (path / name.replace("_", ".")).write_text(json.dumps(content) + "\n")
    return path


def sentence(page: Page, chart: str) -> Any:
    return page.locator(f"#{chart} + .missing")


def test_a_run_without_an_update_says_when_there_will_be_something(browser: Browser, tmp_path: Path) -> None:
    path = begun(tmp_path / "fresh")
    with watching(tmp_path) as server, opened(browser, server.url) as page:
        expect(sentence(page, "chart-return")).to_have_text(
            "There are no returns yet: they come when the first update ends."
        )
        expect(sentence(page, "timeline")).to_have_text(
            "There is no timeline yet: it comes when the workers have started."
        )
        for chart in CHARTS:
            expect(page.locator(f"#{chart}")).to_be_hidden()
            expect(sentence(page, chart)).to_contain_text("yet: ")
        expect(page.locator("#figures")).to_contain_text("There are no figures yet")
        expect(page.locator("#ledger")).to_contain_text("There are no counts yet")
        (path / "summary.json").write_text('{"outcome": "failed"}')
        expect(sentence(page, "chart-return")).to_have_text(
            "There are no returns: this run ended before the first update."
        )
        expect(sentence(page, "timeline")).to_have_text("No timeline was recorded in this run.")


def test_a_run_without_an_episode_says_so_and_draws_the_rest(browser: Browser, tmp_path: Path) -> None:
    record = {"step": 1, "update": 1, "wall_seconds": 1.0, "episodes": 0, "return_mean": None, "steps_per_second": 2.0}
    path = begun(tmp_path / "short", metrics_jsonl=record)
    with watching(tmp_path) as server, opened(browser, server.url) as page:
        until(page, "document.getElementById('chart-steps').data?.length === 1")
        expect(sentence(page, "chart-steps")).to_be_hidden()
        expect(sentence(page, "chart-return")).to_have_text(
            "There are no returns yet: they come when the first episode ends."
        )
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**record, "step": 2, "update": 2, "return_mean": 5.0}) + "\n")
        until(page, "document.getElementById('chart-return').data?.[0]?.y?.at(-1) === 5")
        expect(sentence(page, "chart-return")).to_be_hidden()
        expect(page.locator("#chart-return")).to_be_visible()


def test_without_a_run_and_without_a_tick_the_page_says_so(browser: Browser, tmp_path: Path) -> None:
    with watching(tmp_path) as server, opened(browser, server.url) as page:
        expect(page.locator("#runs-hint")).to_contain_text("There is no run in this folder yet")
        expect(page.locator("#subtitle")).to_contain_text("appears here as soon as freerun train has started it")
        expect(page.locator("figure").first).to_be_hidden()
        write_run(tmp_path / "one")
        expect(page.locator("#title")).to_have_text("one")
        until(page, "document.getElementById('chart-return').data?.length === 1")
        page.locator("#runs .run input").click()
        expect(page.locator("#title")).to_have_text("No run is ticked")
        expect(page.locator("figure").first).to_be_hidden()
        page.locator("#runs .run input").click()
        expect(page.locator("figure").first).to_be_visible()
