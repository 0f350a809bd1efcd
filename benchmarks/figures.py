"""Writes everything measured that README.md and docs/ show, from the JSON files under benchmarks/results. Runs nothing.

First every benchmark writes its own page and picture again. Then these marks in README.md and docs/*.md are filled in:

- `62<!--=default_flags; HalfCheetah × 2; share-->`: the number before the mark is the first number of a cell in a page
  of results. The mark names the page, a section where tables of several have such a row, the row and the column. A row
  or a column is named by how it begins; a row with several names by how its cells begin, with ` + ` between them.
  `share#2` is the second number of the cell, and `steps/s in millions` is rounded.
- `3.4<!--=probe_accuracy; Median error:-->`: the number that follows these words in a page of results.
- `17<!--=name-->`: the number that the function of that name in `DERIVED` returns.
- `<!-- figure: name -->` … `<!-- end -->`: what stands between is what the function in `BLOCKS` returns.

`--stale` lists results that were measured with other sources than today's, with the command that renews them.
"""

from __future__ import annotations

import functools
import importlib
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent))  # where this module is imported by a test
from catalogue import BENCHMARKS, REPOSITORY, RESULTS, fingerprint, result_files, sources_of
from not_measured import NOT_MEASURED
from run_file import read_content, stamps_in

NUMBER = r"[−+-]?\d(?:[\d,]*\d)?(?:\.\d+)?"
MARK = re.compile(rf"({NUMBER})<!--=(.+?)-->")
BLOCK = re.compile(r"(<!-- figure: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
UNIT = (
    r"(?:million )?(?:×(?! ?[\d√])|%|steps?(?:/s| (?:a|per) second)|times|(?:second|minute|hour)s?|[µm]?s\b|[KMG]i?B\b)"
)
COUNTED = "workers|cores|environments|seeds|drones|minibatches|epochs|networks|units|pixels|orders|actions"
"""What a number in front of such a word counts was set, not measured."""
NOT_IN_SENTENCES = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|(?<=\])\([^)\n]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Options:
    benchmarks: tuple[str, ...] = tuple(BENCHMARKS)
    """Whose pages and pictures are written again."""
    results: Path = RESULTS
    """Folder of the results. README.md and docs/ are written only from those of the repository."""
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
            return cells[0] == parts[0] and set(parts) <= set(cells)
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
        # Two dashes would end the comment that is a mark.
        cells = [re.sub(r"[`*]|--(?=\w)", "", cell).strip() for cell in line.strip().strip("|").split("|")]
        if not heads:
            heads = cells
        elif not set(line) <= set("|-: "):
            rows.append(Row(section, dict(zip(heads, cells, strict=True))))
    return rows


@functools.cache
def page_of(name: str) -> list[Row]:
    return rows_of(text_of(name))


def text_of(name: str) -> str:
    folder, _, file = name.partition("/")
    [path] = (RESULTS / folder).glob(f"{file or '*'}.md")
    return path.read_text(encoding="utf-8")


def cell(mark: str) -> str:
    """Return the number that a mark of several parts names."""
    page, *section, row, column = mark.split("; ")
    column, in_millions, _ = column.partition(" in millions")
    column, _, place = column.partition("#")
    in_section = [one for one in page_of(page) if not section or one.section.startswith(section[0])]
    # "Pendulum-v1" also begins the section "Pendulum-v1, SAC".
    rows = [one for one in in_section if section and one.section == section[0]] or in_section
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
    number = str(numbers[int(place or 1) - 1])
    if in_millions:
        number = f"{as_float(number) / 1e6:{'.1f' if as_float(number) < 2e7 else '.0f'}}"
    return number.replace("-", "−")


def after_words(mark: str) -> str:
    """Return the number that follows some words in a page."""
    page, words = mark.split("; ")
    found = " ".join(text_of(page).split()).partition(words)[2]
    if not found:
        raise SystemExit(f"{mark}: there are no such words in the page")
    return str(re.findall(NUMBER, found)[0]).replace("-", "−")


def as_float(number: str) -> float:
    return float(number.replace(",", "").replace("−", "-"))


def write_pages(names: tuple[str, ...], results: Path) -> None:
    """Let benchmarks write their pages and pictures again from their JSON files."""
    for name in names:
        files = [results / file.relative_to(RESULTS) for file in result_files(name)]
        for folder in dict.fromkeys(file.parent for file in files if file.exists()):
            importlib.import_module(name).write_reports(folder)
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
    measured = {(row.section, row.cells["system"]) for row in page_of("time_to_score") if "seconds" in row.cells}
    for system in systems:
        cells = [
            cell(f"time_to_score; {task}; {system}; seconds")
            if any(section == head and name.startswith(system) for section, name in measured)
            else "not measured"
            for task, head in zip(tasks, heads, strict=True)
        ]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def readme() -> str:
    """The few lines by which a reader of README judges: freerun beside Stable-Baselines3."""
    share = cell("default_flags; Straggler × 100, no other flags; share")
    runs = cell("default_flags; Straggler × 100, no other flags; repetitions")
    theirs, their_runs = (cell(f"peers; straggler; sb3_subproc; {column}") for column in ("of bare", "runs"))
    lines = ["| | freerun | Stable-Baselines3 | runs |", "| --- | ---: | ---: | ---: |"]
    lines.append(
        f"| 100 uneven environments: share of the machine's limit | {share} % | {theirs} % | {runs}, {their_runs} |"
    )
    for section in dict.fromkeys(row.section for row in page_of("time_to_score") if "seconds" in row.cells):
        rows = [row.cells for row in page_of("time_to_score") if row.section == section]
        ours, other = (
            next(one for one in rows if one["system"].startswith(system)) for system in ("freerun", "Stable-Baselines3")
        )
        seconds = [one["seconds"].split(" ")[0] for one in (ours, other)]
        reached = ", ".join(one["reached"].split("/")[0] for one in (ours, other))
        name = section.replace(": ", ", return ")
        lines.append(f"| {name}: seconds | {seconds[0]} | {seconds[1]} | {reached} |")
    return "\n".join(lines)


def table_of(page: str, number: int) -> Callable[[], str]:
    """Return what copies a table of a page of results."""
    return lambda: str(re.findall(r"(?:^\|.*\n)+", text_of(page), re.MULTILINE)[number]).strip()


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


def workflow_search() -> str:
    """A line for each number of trainings, with what each sampler lost."""
    rows = [row.cells for row in page_of("workflow_search") if "sampler" in row.cells]
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    heads = " | ".join(f"`{sampler}`: lost | within noise" for sampler in samplers)
    lines = [f"| trainings | {heads} |", "| ---: |" + " ---: | ---: |" * len(samplers)]
    for number in dict.fromkeys(row["trainings"] for row in rows):
        cells = [f"{row['lost']} | {row['within noise']}" for row in rows if row["trainings"] == number]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "default_flags": table_of("default_flags", 0),
    "default_sizes": table_of("default_sizes", 0),
    "readme": readme,
    "peers": peers,
    "time_to_score": time_to_score,
    "scaling_costs": table_of("scaling", 0),
    "scaling_updates": table_of("scaling", 1),
    "scaling_limits": table_of("scaling", 2),
    "scaling_simulated": scaling_simulated,
    "workflow_search": workflow_search,
}


def mbpo_hopper_minutes() -> str:
    runs = read_content(RESULTS / "sample_efficiency" / "sample_efficiency.json")
    return f"{statistics.median(run['wall_seconds'] / 60 for run in runs if run['task'] == 'Hopper-v5'):.0f}"


def probe_lowest_share() -> str:
    """The lowest share of the best mode's speed that the mode which `auto` picked has reached."""
    rows = [row.cells for row in page_of("probe_accuracy") if "share" in row.cells]
    return f"{min(int(row['share'].removesuffix(' %')) for row in rows)}"


DERIVED: dict[str, Callable[[], str]] = {
    "mbpo_hopper_minutes": mbpo_hopper_minutes,
    "probe_lowest_share": probe_lowest_share,
}


def filled_in(text: str) -> str:
    """Return a page with all its marks filled in."""
    text = MARK.sub(lambda found: f"{shown(found.group(2))}<!--={found.group(2)}-->", text)
    return BLOCK.sub(lambda found: f"{found.group(1)}{BLOCKS[found.group(2)]()}\n{found.group(4)}", text)


def shown(mark: str) -> str:
    ways = {1: lambda _: DERIVED[mark](), 2: after_words}
    return ways.get(len(mark.split("; ")), cell)(mark)


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


# ---------------------------------------------------------------------------------------------- what is not written


def unwritten(text: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """Return the figures of a page that look measured, are not filled in, and do not stand in an allowed phrase.

    A number with a unit of measurement looks measured, and so does any number in a paragraph (with the list or table
    after it) that names results, unless it counts what is set. Code, links and names as HalfCheetah-v5 do not count.
    """
    text = BLOCK.sub(lambda found: "\n" * found.group().count("\n"), text)
    text = MARK.sub(" ", text)
    for phrase in allowed:
        text = text.replace(phrase, " ")
    found = []
    for paragraph in _paragraphs(text):
        names_results = "benchmarks/results/" in paragraph or "`benchmarks/" in paragraph
        words = NOT_IN_SENTENCES.sub("`", paragraph)
        unit = rf"(?! ?(?:× \d|{COUNTED}))" if names_results else rf"(?:–\d+)? ?{UNIT}"
        for number in re.finditer(rf"(?<![\w.,`/-])(?<!- )({NUMBER})(?!,?\d){unit}(?![\w-])", words):
            line = words[: number.start()].count("\n")
            found.append(f"{number.group()} in: {words.splitlines()[line].strip()}")
    return found


def allowed_on(page: str) -> tuple[str, ...]:
    return tuple(phrase for phrases in NOT_MEASURED.get(page, {}).values() for phrase in phrases)


def _paragraphs(text: str) -> Iterator[str]:
    gathered = ""
    code = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", code.sub("", text)):
        if gathered and not re.match(r"\s*(?:[-*] |\||\d+\. )", block):
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
            command = f"python benchmarks/{name}.py {benchmark.flags.format(folder=path.parent.name)}".strip()
            result = path.relative_to(path.parents[1])
            if not path.exists():
                yield f"{result}: not there; {command}"
                continue
            stamped = stamps_in(path)
            without = sum(known is None for _, known in stamped)
            old = [
                row
                for row, known in stamped
                if known is not None and known["sources"] != fingerprint(sources_of(path, row))
            ]
            if without:
                rows = "all rows" if without == len(stamped) else f"{without} rows"
                yield f"{result}: {rows} without fingerprint; {command}"
            if old:
                yield f"{result}: other sources for {', '.join(dict.fromkeys(old))}; {command}"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.stale:
        found = list(stale())
        print("\n".join([*found, f"{len(found)} stale results"]))
        return
    write_pages(options.benchmarks, options.results)
    for path in pages() if options.results == RESULTS else ():
        before = path.read_text(encoding="utf-8")
        after = filled_in(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
