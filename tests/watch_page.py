"""Opens the page of `freerun watch` in a real browser, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, expect

SOON_MS = 20_000
"""Far more than any step needs, because the machine may be busy."""
expect.set_options(timeout=SOON_MS)


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a page; at the end, its console must hold no error and it must have asked no other server."""
    context = browser.new_context(viewport={"width": 1300, "height": 900}, **options)
    page = context.new_page()
    complaints: list[str] = []
    asked: set[str] = set()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.add(request.url.split("/")[2]) if "//" in request.url else None)
    page.goto(url)
    yield page
    context.close()
    assert complaints == []
    assert asked == {url.split("/")[2]}


def until(page: Page, condition: str) -> None:
    """Wait until a condition holds. The page's security policy forbids Playwright's `wait_for_function`."""
    for _ in range(SOON_MS // 100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never came true: {condition}")
