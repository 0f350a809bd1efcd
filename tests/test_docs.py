"""The documentation: it builds without a broken link, fetches nothing from the network, and has every report in it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
LINK = re.compile(r"\]\(([^()\s:#]+)(?:#[^()\s]*)?\)")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*/*.md")])

OTHER_PROGRAMS_FLAGS = {
    *("--no-deps", "--logdir", "--name", "--again"),
    *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"),  # torchrun
    *("--address", "--head", "--include-dashboard", "--node-ip-address", "--tmux", "--generate"),  # ray
    *("--cpus-per-task", "--nodes"),  # sbatch
    *("--superlink", "--root-certificates", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"),  # Flower
    *("--n-envs", "--n-workers", "--workflows"),  # the original scripts, which the documentation translates
}


def build(project: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """With the very words of `make docs`."""
    pytest.importorskip("mkdocs", reason="pip install 'freerun[docs]'")
    recipe = re.search(r"\$\(BIN\)/(mkdocs build .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recipe is not None
    command = [sys.executable, "-W", "ignore", "-m", *recipe.group(1).split(), "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_broken_link_and_a_list_after_text_end_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("mkdocs.yml", "benchmarks", "examples", "ARCHITECTURE.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "modes.md").open("a", encoding="utf-8") as page:
        page.write("\nSome words, and [a link](nowhere.md):\n- one\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "a link 'nowhere.md'" in done.stderr
    assert re.search(r"modes\.md, line \d+: put an empty line before this list or table", done.stderr)


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


@pytest.fixture(scope="module")
def names_in_source() -> set[str]:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")]
    return set(re.findall(r"--[a-z-]+|[a-z]\w+", " ".join(path.read_text(encoding="utf-8") for path in sources)))


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_every_flag_that_a_page_names_is_a_setting(page: Path, names_in_source: set[str]) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "coming_from.md":  # its tables have a column of ours, then those of other libraries
        text = re.sub(r"(?m)^(\|[^|]*\|).*$", r"\1", text)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?![_*])", text)) - OTHER_PROGRAMS_FLAGS
    names = {flag: flag[2:].replace("-", "_") for flag in flags}
    assert not {flag for flag, name in names.items() if not {flag, name, name.removeprefix("no_")} & names_in_source}


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="pip install 'freerun[docs]'")
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_list_and_table_is_rendered_as_one(hooks: ModuleType, page: Path) -> None:
    assert hooks.run_on_blocks(page.read_text(encoding="utf-8")) == []


TABLE = "| a |\n| --- |\n| b |\n"


@pytest.mark.parametrize(
    ("text", "lines", "num_rendered"),
    [
        ("Some words:\n- one\n- two\n", [2], 0),
        ("Some words:\n1. one\n2. two\n", [2], 0),
        ("Some words,\nand more:\n  * one\n", [3], 0),
        ("Some words:\n" + TABLE, [2], 0),
        ("```\nwords\n```\n- one\n", [4], 0),
        ("```\nwords\n```\n" + TABLE, [4], 0),
        (TABLE + "- one\n", [4], 0),
        ("Some words:\n\n- one\n  goes on\n- two\n\n    more of two\n- three\n", [], 1),
        ("## Title\n- one\n", [], 1),
        ("<!-- by a script -->\n" + TABLE, [], 1),
        ("## Title\n" + TABLE + "\n- one\n", [], 2),
        ("```\nwords\n- no list\n```\n\n- one\n", [], 1),
        ("1. one:\n\n    " + TABLE.replace("\n|", "\n    |") + "\n2. two\n", [], 2),
    ],
)
def test_a_list_or_table_directly_after_text_is_found(
    hooks: ModuleType, text: str, lines: list[int], num_rendered: int
) -> None:
    """Python-Markdown itself is asked too, how many lists and tables it makes of it."""
    assert hooks.run_on_blocks(text) == lines
    html = pytest.importorskip("markdown").markdown(text, extensions=["tables", "pymdownx.superfences"])
    assert len(re.findall("<(?:ul|ol|table)>", html)) == num_rendered


def test_a_line_that_begins_with_a_number_or_a_dash_is_no_list(hooks: ModuleType) -> None:
    assert hooks.run_on_blocks("In the year\n2026. Then a – dash,\n-5 degrees,\n**bold** words.\n") == []


def test_readme_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installing = (ROOT / "README.md").read_text(encoding="utf-8").split("## Installing\n")[1]
    named = re.findall(r"`([a-z0-9-]+)`", installing.split("Extras: ")[1].split(".\n")[0])
    assert sorted(named) == sorted(project["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_says_that_freerun_is_on_a_package_index(page: Path) -> None:
    assert not re.search(r"pip install (-U )?['\"]?freerun\b", page.read_text(encoding="utf-8"))
