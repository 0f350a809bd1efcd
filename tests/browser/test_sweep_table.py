"""The table of a sweep's trials on the page of `freerun watch`."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Browser, expect
from watch_page import opened
from watch_server import watching, write_run


def test_trials_are_listed_the_best_first_and_a_click_shows_one(browser: Browser, tmp_path: Path) -> None:
    trials = []
    for number, (state, score) in enumerate((("complete", 10.0), ("complete", 30.0), ("running", None))):
        write_run(tmp_path / "sweep" / f"trial-{number:03}", seed=number)
        own = {"parameters": {"learning_rate": 0.001 * (number + 1)}, "runs": [f"trial-{number:03}"], "seconds": 1.5}
        trials.append({"number": number, "state": state, "score": score, **own})
    write_run(tmp_path / "single")
    content = {"env": "CartPole-v1", "vary": ["learning_rate"], "trials": trials}
    (tmp_path / "sweep" / "trials.json").write_text(json.dumps(content))
    with watching(tmp_path, selected="sweep/trial-000") as server, opened(browser, server.url) as page:
        rows = page.locator("#sweep tr")
        expect(rows).to_have_count(4)
        expect(rows.nth(0)).to_contain_text("learning-rate")
        assert [rows.nth(place).locator("button").inner_text() for place in (1, 2, 3)] == ["1", "0", "2"]
        rows.nth(1).locator("button").click()
        expect(page.locator("#title")).to_have_text("sweep/trial-001")
        expect(page.locator("#sweep button.on")).to_have_text("1")
    with watching(tmp_path, selected="single") as server, opened(browser, server.url) as page:
        expect(page.locator("#title")).to_have_text("single")
        expect(page.locator("#sweep-box")).to_be_hidden()
