"""Writes everything measured that README.md and docs/ show, from the JSON files under benchmarks/results. Runs nothing.

First every benchmark writes its own page and picture again. Then these marks in README.md and docs/*.md are filled in:

- `62<!--=default_flags; HalfCheetah × 2; share-->`: the number before the mark is the first number of a cell in a page
  of results. The mark names the page, a section where tables of several have such a row, the row and the column. A row
  or a column is named by how it begins; a row with several names by how its cells begin, with ` + ` between them.
- `5.9<!--=name-->`: the number is what the function of that name in `DERIVED` returns.
- `<!-- figure: name -->` … `<!-- end -->`: what stands between is what the function in `BLOCKS` returns.

`--stale` lists results that were measured with other sources than today's, with the command that renews them.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent))  # where this module is imported by a test
from catalogue import BENCHMARKS, REPOSITORY, RESULTS, fingerprint, result_files, sources_of
from run_file import stamps_in

NUMBER = r"[−+-]?\d(?:[\d,]*\d)?(?:\.\d+)?"
MARK = re.compile(rf"({NUMBER})<!--=(.+?)-->")
BLOCK = re.compile(r"(<!-- figure: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
UNIT = (
    r"(?:×|%|(?:million |times as many )?steps?(?:/s| a second| per second)|times|seconds?|minutes?|hours?|[µm]?s\b"
    r"|[KMG]i?B\b)"
)
NOT_IN_SENTENCES = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|(?<=\])\([^)\n]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)
NO_JSON = {"chaos": "tests/chaos.py prints its table, which was written down", "timeline": "its runs were not kept"}
"""Pages of results that cannot be written again yet, and why."""


@dataclass(frozen=True)
class Options:
    benchmarks: tuple[str, ...] = tuple(BENCHMARKS)
    """Whose pages and pictures are written again."""
    stale: bool = False
    """List stale results instead, and write nothing."""


# ---------------------------------------------------------------------------------------------- pages of results


@dataclass(frozen=True)
class Row:
    """A row of a table in a page of results."""

    section: str
    cells: dict[str, str]
    """By the heads of their columns."""

    def is_named(self, name: str, *, exactly: bool) -> bool:
        cells = list(self.cells.values())
        parts = name.split(" + ")
        if exactly:
            return len(parts) == 1 and cells[0] == name
        return cells[0].startswith(parts[0]) and all(any(cell.startswith(part) for cell in cells) for part in parts)


def rows_of(text: str) -> list[Row]:
    """Return the rows of all tables of a page."""
    rows, section, heads = [], "", list[str]()
    for line in text.splitlines():
        if not line.startswith("|"):
            heads = []
            if line.startswith(("#", "**")):
                section = line.strip("#* ")
            continue
        cells = [cell.replace("`", "").replace("*", "").strip() for cell in line.strip().strip("|").split("|")]
        if not heads:
            heads = cells
        elif not set(line) <= set("|-: "):
            rows.append(Row(section, dict(zip(heads, cells, strict=True))))
    return rows


@functools.cache
def page_of(name: str) -> list[Row]:
    folder, _, file = name.partition("/")
    [path] = (RESULTS / folder).glob(f"{file or '*'}.md")
    return rows_of(path.read_text(encoding="utf-8"))


def cell(mark: str) -> str:
    """Return the number that a mark of several parts names; column `share#2` is the second number of a cell."""
    page, *section, row, column = mark.split("; ")
    column, _, place = column.partition("#")
    rows = [one for one in page_of(page) if not section or one.section.startswith(section[0])]
    rows = [one for one in rows if any(head.startswith(column) for head in one.cells)]
    found = [one for one in rows if one.is_named(row, exactly=True)] or [
        one for one in rows if one.is_named(row, exactly=False)
    ]
    if len(found) != 1:
        raise SystemExit(f"{mark}: {len(found)} rows begin so, not one")
    cells = found[0].cells
    head = column if column in cells else next(head for head in cells if head.startswith(column))
    numbers = re.findall(NUMBER, cells[head].replace("–", " – "))
    if len(numbers) < int(place or 1):
        raise SystemExit(f"{mark}: there is no such number in “{cells[head]}”")
    return str(numbers[int(place or 1) - 1])


def value(mark: str) -> float:
    """Return that number for further calculation."""
    return float(cell(mark).replace(",", "").replace("−", "-"))


def write_pages(names: tuple[str, ...]) -> None:
    """Let benchmarks write their pages and pictures again from their JSON files."""
    for name in names:
        module = importlib.import_module(name)
        for folder in dict.fromkeys(file.parent for file in result_files(name) if file.exists()):
            module.write_reports(folder)
    page_of.cache_clear()


# ---------------------------------------------------------------------------------------------- README and docs


def peers() -> str:
    return str(importlib.import_module("peers").summary_of(RESULTS / "peers"))


def time_to_score() -> str:
    """Median seconds by system and task."""
    tasks = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")
    systems = ("freerun", "single-file PPO", "Stable-Baselines3", "Sample Factory")
    heads = [next(row.section for row in page_of("time_to_score") if row.section.startswith(task)) for task in tasks]
    lines = [f"| | {' | '.join(head.replace(':', ',') for head in heads)} |", "| --- |" + " ---: |" * len(tasks)]
    for system in systems:
        cells = [cell(f"time_to_score; {task}; {system}; seconds") for task in tasks]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling_table(number: int) -> Callable[[], str]:
    """Return what copies a table of the simulation's page."""

    def copy() -> str:
        text = (RESULTS / "scaling" / "scaling.md").read_text(encoding="utf-8")
        return str(re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[number]).strip()

    return copy


def scaling_simulated() -> str:
    """A line for each simulated cluster, by the number of workers: steps per second, efficiency, what is saturated."""
    rows = [row for row in page_of("scaling") if "workers" in row.cells]
    numbers = list(dict.fromkeys(row.cells["workers"] for row in rows))
    lines = [
        "| simulated: steps/s (efficiency), what is saturated | " + " | ".join([f"{numbers[0]} workers", *numbers[1:]]),
        "| --- " * (1 + len(numbers)),
    ]
    for section in dict.fromkeys(row.section for row in rows):
        cells = [row.cells for row in rows if row.section == section]
        shown = [f"{one['steps/s']} ({one['efficiency']}) {one['saturated']}" for one in cells]
        lines.append(f"| {section} | " + " | ".join(shown).replace("nothing", "–"))
    return "\n".join(f"{line.rstrip()} |" for line in lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "peers": peers,
    "time_to_score": time_to_score,
    "scaling_costs": scaling_table(0),
    "scaling_updates": scaling_table(1),
    "scaling_limits": scaling_table(2),
    "scaling_simulated": scaling_simulated,
}


def millions(mark: str) -> Callable[[], str]:
    def scaled() -> str:
        found = value(mark) / 1e6
        return f"{found:.1f}" if found < 20 else f"{found:.0f}"

    return scaled


def whole(mark: str) -> Callable[[], str]:
    return lambda: f"{value(mark):.0f}".replace("-", "−")


DERIVED: dict[str, Callable[[], str]] = {}


def filled_in(text: str) -> str:
    """Return a page with all its marks filled in."""
    text = MARK.sub(lambda found: f"{shown(found.group(2))}<!--={found.group(2)}-->", text)
    return BLOCK.sub(lambda found: f"{found.group(1)}{BLOCKS[found.group(2)]()}\n{found.group(4)}", text)


def shown(mark: str) -> str:
    return cell(mark) if "; " in mark else DERIVED[mark]()


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


# ---------------------------------------------------------------------------------------------- what is not written


def unwritten(text: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """Return the figures of a page that look measured, are not filled in, and do not stand in an allowed phrase.

    A number with a unit of measurement looks measured, and so does any number in a paragraph (with the list or table
    after it) that links to results. Code, links and names such as HalfCheetah-v5 do not count.
    """
    text = BLOCK.sub(lambda found: "\n" * found.group().count("\n"), text)
    text = MARK.sub(" ", text)
    for phrase in allowed:
        text = text.replace(phrase, " ")
    found = []
    for paragraph in _paragraphs(text):
        names_results = "benchmarks/results/" in paragraph or "`benchmarks/" in paragraph
        words = NOT_IN_SENTENCES.sub("`", paragraph)
        unit = "" if names_results else rf"(?:–\d+)? ?{UNIT}"
        for number in re.finditer(rf"(?<![\w.,`/-])(?<!- )({NUMBER}){unit}(?![\w-])", words):
            line = words[: number.start()].count("\n")
            found.append(f"{number.group()} in: {words.splitlines()[line].strip()}")
    return found


def _paragraphs(text: str) -> Iterator[str]:
    gathered = ""
    code = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", code.sub("", text)):
        if gathered and not re.match(r"\s*(?:[-*|]|\d+\.) ?", block):
            yield gathered
            gathered = ""
        if block.lstrip().startswith("#"):
            if gathered:
                yield gathered
            gathered = ""
        gathered += f"{block}\n\n"
    yield gathered


# ---------------------------------------------------------------------------------------------- stale results


def stale() -> Iterator[str]:
    """Say of each result that was not measured with today's sources why, and how it is renewed."""
    for name, benchmark in BENCHMARKS.items():
        for path in result_files(name):
            command = f"python benchmarks/{name}.py {benchmark.flags}".strip()
            if not path.exists():
                yield f"{path.parent.name}: no JSON file; {command}"
                continue
            stamped = stamps_in(path)
            wanted = fingerprint(sources_of(path))
            without = sum(known is None for _, known in stamped)
            old = [row for row, known in stamped if known is not None and known["sources"] != wanted]
            if without:
                rows = "all rows" if without == len(stamped) else f"{without} rows"
                yield f"{path.parent.name}: {rows} without fingerprint; {command}"
            if old:
                yield f"{path.parent.name}: other sources for {', '.join(dict.fromkeys(old))}; {command}"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.stale:
        found = [*stale(), *(f"{name}: {why}" for name, why in NO_JSON.items() if name not in BENCHMARKS)]
        print("\n".join([*found, f"{len(found)} stale results"]))
        return
    write_pages(options.benchmarks)
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = filled_in(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
