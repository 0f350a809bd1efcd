"""The documentation as it is opened from the disk, in a real browser: it looks things up and asks nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def test_search_works_from_the_disk_without_a_network(browser: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=100)
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "index.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type("bootstrap")
    page.wait_for_selector(".md-search-result__item a")
    assert page.locator(".md-search-result__item a[href*='truncation.html']").count()
    assert not [url for url in asked if url.startswith("http")]
    page.close()
