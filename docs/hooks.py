"""What `make docs` adds to the pages of docs/: the benchmarks' own reports, and pages at the root of the repository.

They are taken as they lie, so nothing is copied by hand. Links that lead through the repository become links within the
site, and those to files that are no page (the code) become plain text.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

logger = logging.getLogger("mkdocs.hooks.freerun")
"""`mkdocs build --strict` counts the warnings of every logger below `mkdocs` as errors."""
ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"
AT_ROOT = ("ARCHITECTURE.md", "CHANGELOG.md")
BENCHMARKS = "Benchmarks"
ALONE = ("index.md", "metrics.md")
"""The only pages of their tabs: a list of one would only take room."""
SHOWN_ELSEWHERE = f"{RESULTS}/matrix/matrix.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
INCLUDED = re.compile(r"^<!-- (examples/\w+\.py) -->$", re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
LIST_ITEM = re.compile(r" {0,3}(?:[-*+]|1[.)])\s")
"""What may begin a list. A line that begins with another number than 1 mostly ends a sentence, as a year does."""


def _taken() -> list[str]:
    """Pages and pictures from outside docs/, by their path in the repository, which is their path in the site too."""
    found = sorted(path for kind in ("md", "png") for path in (ROOT / RESULTS).glob(f"*/*.{kind}"))
    return [*AT_ROOT, *(path.relative_to(ROOT).as_posix() for path in found)]


def _title(path: str) -> str:
    """Of a report, by its folder: short, as a list of them wants it."""
    return posixpath.basename(posixpath.dirname(path)).replace("_", " ").capitalize()


def _code(included: re.Match[str]) -> str:
    path = included.group(1)
    return f'## The whole file\n```python title="{path}"\n{(ROOT / path).read_text(encoding="utf-8")}```'


def run_on_blocks(markdown: str) -> list[int]:
    """Numbers of the lines where a list or a table begins that is rendered as running text with what stands above.

    Python-Markdown needs an empty line or a heading before either. GitHub does not, so it is easily missed.
    """
    found = []
    is_code, block = False, ""
    for number, line in enumerate(markdown.splitlines(), start=1):
        kind = "list" if LIST_ITEM.match(line) else "table" if line.startswith("|") else "text"
        if line.lstrip().startswith("```"):
            is_code = not is_code
            block = "list" if line.startswith(" ") else "text"  # a code block counts as text
        elif is_code:
            continue
        elif line.startswith(("#", "<!--")) or not line.strip():
            block = ""
        elif not block:
            block = "list" if line.startswith("    ") else kind  # an indented block continues an item
        elif kind != block and (kind == "table" or (kind == "list" and block != "list")):
            found.append(number)
            block = kind  # one report for the whole list or table
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    reports = [path for path in _taken() if path.startswith(RESULTS) and path.endswith(".md")]
    section: list[Any] = next(entry[BENCHMARKS] for entry in config.nav or [] if BENCHMARKS in entry)
    section += [{_title(path): path} for path in reports if path != SHOWN_ELSEWHERE]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in _taken():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if here in ALONE:
        page.meta["hide"] = ["navigation"]
    for number in run_on_blocks(markdown):
        logger.warning("%s, line %d: put an empty line before this list or table: it is rendered as text", here, number)
    in_repository = here if here in _taken() else f"docs/{here}"

    def mend(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        path, mark, anchor = target.partition("#")
        if not path or ":" in path:
            return link.group()
        meant = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), path))
        in_site = meant.removeprefix("docs/")
        if files.get_file_from_path(in_site) is not None:
            relative = posixpath.relpath(in_site, posixpath.dirname(here) or ".")
            return f"{picture}[{text}]({relative}{mark}{anchor})"
        return text if os.path.exists(ROOT / meant) else link.group()  # mkdocs says what leads nowhere

    if here.startswith(RESULTS) and not markdown.startswith("# "):
        markdown = f"# {_title(here)}\n\n{markdown}"
    markdown = INCLUDED.sub(_code, markdown)
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(mend, part) for part in parts)
