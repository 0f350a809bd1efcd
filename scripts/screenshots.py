"""Takes screenshots for the docs with a real browser: `freerun watch` with short runs, or a report of `freerun bench`.

It needs Playwright for Python and an installed Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from playwright.sync_api import Browser, sync_playwright

BROWSER_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1440, "height": 1000}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1440, "height": 1000}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}


@dataclass(frozen=True)
class Options:
    output: Path = Path("docs/pictures")
    """Folder for watch-light.png, watch-dark.png and watch-phone.png."""
    runs: Path | None = None
    """A folder of runs to show (eight short ones are trained if not given)."""
    report: Path | None = None
    """Show this report.html as bench-light.png, bench-dark.png and bench-phone.png, and nothing else."""
    full: bool = False
    """The whole page, not only what fits the window."""


def train(runs: Path) -> None:
    """Train three seeds of two modes on CartPole, then two modes on Straggler, which the page shows."""
    for mode in ("sequential", "freerun"):
        for seed in range(3):
            words = ["CartPole-v1", "--mode", mode, "--seed", str(seed), "--total-steps", "5000"]
            _train([*words, "--steps-per-update", "500", "--run-dir", str(runs / f"cartpole-{mode}-{seed}")])
    for mode, steps in (("sync", "16000"), ("freerun", "40000")):
        words = ["freerun/Straggler-v0", "--mode", mode, "--num-workers", "16", "--total-steps", steps]
        words += ["--steps-per-update", "1600", "--run-dir", str(runs / f"straggler-{mode}")]
        _train(words + (["--segment-steps", "25"] if mode == "freerun" else []))


def _train(words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "freerun", "train", *words, "--quiet"], check=True)


def take(browser: Browser, address: str, options: Options) -> None:
    for name, view in VIEWS.items():
        page = browser.new_context(**view).new_page()
        page.goto(address)
        page.wait_for_selector("#chart-return .scatterlayer .trace")
        if name != "phone":  # where there is room, a second run is shown for comparison
            page.locator("#runs .run input:not(:checked)").first.click()
        page.wait_for_timeout(3000)  # time for the page to fetch and draw everything
        page.screenshot(path=options.output / f"watch-{name}.png", full_page=options.full)
        page.close()


def take_report(browser: Browser, report: Path, options: Options) -> None:
    for name, view in VIEWS.items():
        page = browser.new_context(**view).new_page()
        page.goto(report.resolve().as_uri())
        page.screenshot(path=options.output / f"bench-{name}.png", full_page=options.full)
        page.close()


def main(options: Options) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if options.report is not None:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_ARGUMENTS)
            take_report(browser, options.report, options)
            browser.close()
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or Path(folder)
        if options.runs is None:
            train(runs)
        command = [sys.executable, "-m", "freerun", "watch", str(runs), "--until-input-ends", "--port", "0"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_ARGUMENTS)
                take(browser, server.stdout.readline().strip(), options)
                browser.close()
        finally:
            # It closes the server's stdin, at which --until-input-ends ends it.
            server.communicate(timeout=10)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
