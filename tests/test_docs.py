"""The documentation: it builds without a broken link, fetches nothing from the network, and has every report in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
LINK = re.compile(r"\]\(([^()\s:#]+)(?:#[^()\s]*)?\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="pip install 'freerun[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    fetched = {page.name: found for page in pages if (found := FETCHED.findall(page.read_text(encoding="utf-8")))}
    assert not fetched
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"url\(['\"]?https?:|@import", styles)


def test_what_would_fetch_something_is_found() -> None:
    assert FETCHED.search('<script src="https://cdn.example/x.js"></script>')
    assert FETCHED.search('<link rel="stylesheet" href="//fonts.example/css">')
    assert not FETCHED.search('<a href="https://ui.perfetto.dev">')


def test_every_report_of_a_benchmark_is_a_page(site: Path) -> None:
    home = (site / "benchmarks.html").read_text(encoding="utf-8")
    for report in (ROOT / "benchmarks" / "results").glob("*/*.md"):
        page = report.relative_to(ROOT).with_suffix(".html")
        assert (site / page).is_file()
        assert page.as_posix() in home, "it is in the navigation"


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_at_the_root_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [target for target in LINK.findall(text) if not (ROOT / target).exists()]
