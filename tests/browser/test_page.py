"""What a person sees: the page of `freerun watch` in a real browser, beside real runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect
from watch_page import SOON_MS, opened, until
from watch_server import Server, watching, write_run


@contextmanager
def training(run_dir: Path) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "freerun", "train", "freerun/Straggler-v0", "--num-workers", "2", "--quiet"]
    command += ["--total-steps", "1000000", "--segment-steps", "25", "--steps-per-update", "50", "--num-epochs", "1"]
    command += ["--hidden-sizes", "8", "--env-args", "mean_seconds", "0.004", "--run-dir", str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def num_points(page: Page) -> int:
    found: int = page.evaluate("document.getElementById('chart-return').data?.[0]?.x?.length ?? 0")
    return found


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one")
    write_run(folder / "two", seed=1)
    with watching(folder) as server:
        yield server


def test_a_run_is_followed_while_it_trains_and_a_killed_worker_is_seen(browser: Browser, tmp_path: Path) -> None:
    with training(tmp_path / "runs" / "live") as process, watching(tmp_path, selected="runs/live") as server:
        with opened(browser, server.url) as page:
            until(page, "document.getElementById('chart-return').data?.[0]?.x?.length > 2")
            expect(page.locator("#connection")).to_have_text("running")
            before = num_points(page)
            until(page, f"document.getElementById('chart-return').data[0].x.length > {before}")
            until(page, "document.getElementById('timeline').data?.[0]?.y?.length === 3")
            expect(page.locator("#num-incidents")).to_have_text("0")
            workers = [child for child in process.children(recursive=True) if not child.children()]
            os.kill(workers[-1].pid, signal.SIGKILL)
            expect(page.locator("#num-incidents")).to_have_text("1", timeout=SOON_MS)
            process.send_signal(signal.SIGINT)
            expect(page.locator("#connection")).to_have_text("interrupted", timeout=SOON_MS)
            expect(page.locator("#ledger")).to_contain_text("trained", timeout=SOON_MS)
            page.locator("#log-box summary").click()
            expect(page.locator("#log")).to_contain_text("died of SIGKILL")
            page.locator(".incident summary").click()
            expect(page.locator(".incident pre")).to_contain_text("died of SIGKILL")
        with opened(browser, server.url) as page:  # a browser that comes later finds it all
            until(page, f"document.getElementById('chart-return').data?.[0]?.x?.length >= {before}")
            expect(page.locator("#connection")).to_have_text("interrupted")


def test_runs_are_compared(browser: Browser, two_runs: Server) -> None:
    with opened(browser, two_runs.url) as page:
        until(page, "document.getElementById('chart-return').data?.length === 1")
        page.locator("#runs .run input:not(:checked)").click()
        until(page, "document.getElementById('chart-return').data?.length === 2")
        names = page.evaluate("document.getElementById('chart-return').data.map((trace) => trace.name)")
        assert sorted(names) == ["one", "two"]


def test_figures_restarts_and_settings_are_shown(browser: Browser, two_runs: Server) -> None:
    with opened(browser, two_runs.url) as page:
        expect(page.locator("#figures")).to_contain_text("steps/s")
        expect(page.locator(".gauge.out")).to_contain_text("target above 80 %")
        expect(page.locator("#advice")).to_contain_text("as long as collecting would")
        expect(page.locator("#num-incidents")).to_have_text("1")
        page.locator(".incident summary").click()
        expect(page.locator(".incident pre")).to_have_text("Traceback: boom")
        page.locator("details", has=page.locator("#config")).locator("summary").click()
        expect(page.locator("#config")).to_contain_text("CartPole-v1")
        until(page, "document.getElementById('chart-lag').data?.[0]?.y?.join() === '75,25'")


def test_the_timeline_can_be_zoomed(browser: Browser, two_runs: Server) -> None:
    with opened(browser, two_runs.url) as page:
        until(page, "document.getElementById('timeline').data?.[0]?.y?.length === 3")
        page.locator("#timeline").scroll_into_view_if_needed()
        box = page.locator("#timeline .nsewdrag").first.bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        with page.expect_request(lambda request: "start=" in request.url and "stop=" in request.url):
            page.mouse.move(box["x"] + 0.25 * box["width"], middle)
            page.mouse.down()
            page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=5)
            page.mouse.up()
        until(page, "document.getElementById('timeline').layout.xaxis.range[1] < 1.2")
        page.locator("[data-window=all]").click()
        until(page, "document.getElementById('timeline').layout.xaxis.range[1] > 1.9")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_its_user_prefers(browser: Browser, two_runs: Server, scheme: str) -> None:
    with opened(browser, two_runs.url, color_scheme=scheme) as page:
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        page.locator("#theme").click()
        expect(page.locator("html")).not_to_have_attribute("data-theme", scheme)


def test_it_fits_a_phone(browser: Browser, two_runs: Server) -> None:
    with opened(browser, two_runs.url) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        until(page, "document.getElementById('timeline').data?.[0]?.y?.length === 3")
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_wrong_token_is_refused(browser: Browser, two_runs: Server) -> None:
    page = browser.new_page()
    answer = page.goto(two_runs.url.replace(two_runs.token, "wrong"))
    assert answer is not None
    assert answer.status == 403
    page.close()


def test_a_page_from_elsewhere_is_refused(browser: Browser, two_runs: Server) -> None:
    """Another name for this address, as after DNS rebinding; and another page that asks."""
    page = browser.new_page()
    answer = page.goto(two_runs.url.replace("127.0.0.1", "rebound.localhost"))
    assert answer is not None
    assert answer.status == 403
    refused = page.evaluate("(url) => fetch(url).then(() => 'answered', () => 'refused')", two_runs.url)
    assert refused == "refused"
    page.close()


def test_it_waits_for_a_server_that_comes_back(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    with watching(tmp_path) as first:
        page = browser.new_page()
        page.goto(first.url)
        until(page, "document.getElementById('chart-return').data?.length === 1")
    expect(page.locator("#connection")).to_contain_text("no answer", timeout=SOON_MS)
    with watching(tmp_path, port=first.port, token=first.token):
        expect(page.locator("#connection")).to_have_text("running", timeout=SOON_MS)
    page.close()
