"""The report of `freerun bench` in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_results import bare, case, results
from matplotlib.image import imsave
from playwright.sync_api import Browser

from freerun.tools.bench.bench_cases import TIMELINES
from freerun.tools.bench.html_report import page as written
from freerun.tools.bench.results import Case

LABELS = ("freerun:segment_steps=25", "freerun", "pipes", "executor", "sync")


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Write a report with two numbers of workers, a mode that is missing, and timelines."""
    rates = {label: 900.0 - 100 * place for place, label in enumerate(LABELS)}
    found = results(
        case("sequential", 1, 95, 96),
        *(case(label, 10, rate, 1.01 * rate) for label, rate in rates.items()),
        Case("bare", 100, 0, [bare(9000), bare(9100)]),
        *(case(label, 100, 8 * rate, 8.1 * rate) for label, rate in rates.items()),
        Case("ray", 10, problem="ray is not installed"),
    )
    object.__setattr__(found.options, "workers", "10,100")
    (tmp_path / TIMELINES).mkdir()
    for each in found.cases:
        if each.runs and not each.is_bare:
            pixels = np.full((each.num_workers + 1, 480, 4), 128, np.uint8)
            imsave(tmp_path / TIMELINES / each.picture, pixels)
    path = tmp_path / "report.html"
    path.write_text(written(found, tmp_path), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_shows_without_a_network(browser: Browser, report: Path, scheme: str, width: int) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True)  # type: ignore[arg-type]
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url) if not request.url.startswith("data:") else None)
    page.goto(f"file://{report}")
    assert complaints == []
    assert asked == [f"file://{report}"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # only tables scroll sideways, inside
    assert page.locator("svg.chart").count() == 2
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth === 480)")
    # The charts take their colours from the page: their first line is as bright as its scheme demands.
    strokes = page.locator("svg.chart").first.evaluate(
        "chart => [...chart.querySelectorAll('path')].map((each) => getComputedStyle(each).stroke)"
    )
    assert ("rgb(47, 111, 222)" if scheme == "light" else "rgb(110, 162, 255)") in strokes
    back, text = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert _brightness(back) > _brightness(text) if scheme == "light" else _brightness(back) < _brightness(text)
    # Names, bars and rates of a mode stand in one row on a wide screen, and none lies over another on a narrow one.
    boxes = page.locator(".bars").first.evaluate(
        "bars => [...bars.querySelectorAll('.name, .value')].map((each) => each.getBoundingClientRect().top)"
    )
    assert boxes == sorted(boxes)
    context.close()


def _brightness(color: str) -> int:
    return sum(int(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])
