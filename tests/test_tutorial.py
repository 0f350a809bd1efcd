"""Pages that do what they say: their files are written, their commands run, their output has the shape they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import freerun

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {"tutorial.md": {"sh": 6, "python": 1}, "deploy.md": {"sh": 4, "python": 5}}
"""And how many blocks of each kind are run there, at least."""
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FREERUN = """#!{python}
import os, sys
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), {source!r})))
sys.path.insert(0, {source!r})
from freerun.tools.cli.main import main
sys.exit(main())
"""


@dataclass
class Part:
    """A block to run or a file to write, and the lines that the page promises."""

    kind: str
    title: str | None
    text: str
    promise: str = ""


def parts(page: str) -> Iterator[Part]:
    found: Part | None = None
    for kind, title, text in BLOCK.findall(page):
        if kind == "text":
            assert found is not None, "a promise without a command before it"
            found.promise = text
        else:
            if found is not None:
                yield found
            found = Part(kind, title or None, text)
    assert found is not None
    yield found


def keeps(promise: str, output: str) -> str | None:
    """The first line that is promised and does not come, in order; `…` is anything."""
    lines = iter(line.strip() for line in output.splitlines())
    for promised in promise.splitlines():
        pattern = re.compile(".*".join(map(re.escape, promised.strip().split("…"))))
        if not any(pattern.fullmatch(line) for line in lines):
            return promised
    return None


def test_a_promise_is_kept_line_by_line() -> None:
    assert keeps("a … c\nend", "a b c\nmore\nend\n") is None
    assert keeps("a … c\nend", "end\na b c\n") == "end"
    assert keeps("3 (…)", "3 [4]\n") == "3 (…)"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "freerun"
    command.parent.mkdir()
    command.write_text(FREERUN.format(python=sys.executable, source=str(Path(freerun.__file__).parent.parent)))
    command.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    paths = os.pathsep.join((str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": paths, "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
    kinds = []
    for part in parts((DOCS / page).read_text(encoding="utf-8")):
        kinds.append(part.kind)
        if part.title is not None:
            (home / part.title).write_text(part.text)
            continue
        program = ["bash", "-euc"] if part.kind == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*program, part.text],
            cwd=home,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        assert done.returncode == 0, f"{part.text}\n{done.stdout}"
        missing = keeps(part.promise, done.stdout)
        assert missing is None, f"the page promises {missing!r} of\n{part.text}\nand this came:\n{done.stdout}"
    assert all(kinds.count(kind) >= fewest for kind, fewest in PAGES[page].items())
