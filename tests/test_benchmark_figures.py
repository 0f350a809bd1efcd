"""What README.md and docs/ show of measurements comes from the JSON files under benchmarks/results, and says so."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import catalogue
import figures
import pictures
from run_file import ResultFile, RunFile, conditions, merge, read_content, stamps_in, write_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = figures.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_figures_has_written_every_figure_of_a_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.filled_in(text) == text, "run `make figures`"
    assert figures.unwritten(text, figures.allowed_on(page.name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_phrase_that_is_allowed_is_needed(page: Path) -> None:
    text, allowed = page.read_text(encoding="utf-8"), figures.allowed_on(page.name)
    for phrase in allowed:
        others = tuple(other for other in allowed if other != phrase)
        assert figures.unwritten(text, others), f"“{phrase}” needs no entry in benchmarks/not_measured.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 5.9 × as fast, 62 % of 3.1 million steps a second.", ["5.9 ×", "62 %", "3.1 million steps a second"]),
        ("It takes 1,234 µs, 4 ms, 0.7 s or 12 seconds.", ["1,234 µs", "4 ms", "0.7 s", "12 seconds"]),
        ("It returns −45 ([table](benchmarks/results/x/x.md)).", ["−45"]),
        ("Returns ([table](benchmarks/results/x/x.md)):\n\n- PPO: −16.7\n- SAC: 3,366", ["−16.7", "3,366"]),
        ("It returns −45.", []),
        ("With 4,096 drones ([table](benchmarks/results/x/x.md)).", []),
        ("`--share 5 %` is code, a picture has 84 × 84 pixels, HalfCheetah-v5 and 64-64 are names.", []),
        ("```\ntakes 3 s\n```\n", []),
        ("It takes 3<!--=x; y; z--> s.", []),
        ("<!-- figure: x -->\n| 3 s |\n<!-- end -->\n", []),
        ("The limit is 5 s, as declared.", []),
    ],
)
def test_figures_that_look_measured_are_found(text: str, found: list[str]) -> None:
    told = figures.unwritten(text, ("limit is 5 s",))
    assert [one.partition(" in: ")[0] for one in told] == found


TABLES = """# Title

## first

| system | seeds | seconds |
| --- | ---: | ---: |
| `freerun` | 5 | 4.6 (4.2 – 5.5) |
| freerun, no lag | 5 | 7 |

## second

| system | seeds | seconds |
| --- | ---: | ---: |
| `freerun` | 3 | -12,345,678 |

Median error: 3.4 %.
"""


@pytest.mark.parametrize(
    ("mark", "number"),
    [
        ("x; first; freerun; seconds", "4.6"),
        ("x; first; freerun; seconds#3", "5.5"),
        ("x; freerun, no lag; sec", "7"),
        ("x; freerun + 3; seconds", "−12,345,678"),
        ("x; second; free; seconds in millions", "−12.3"),
        ("x; Median error:", "3.4"),
    ],
)
def test_a_mark_names_a_number_of_a_page(
    mark: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.page_of.cache_clear()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "x.md").write_text(TABLES, encoding="utf-8")
    assert figures.filled_in(f"takes 1<!--={mark}--> s") == f"takes {number}<!--={mark}--> s"
    with pytest.raises(SystemExit, match="2 rows begin so"):
        figures.filled_in("1<!--=x; freerun; seconds-->")
    figures.page_of.cache_clear()


def test_every_page_of_results_is_what_its_json_says(tmp_path: Path) -> None:
    """In a process of its own, because it imports all benchmarks."""
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    command = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "--results", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(results): path.read_text(encoding="utf-8") for path in results.glob("*/*.md")}
    assert [str(path) for path, text in pages.items() if text != (RESULTS / path).read_text(encoding="utf-8")] == []


def test_every_folder_of_results_belongs_to_a_benchmark() -> None:
    files = [file for name in catalogue.BENCHMARKS for file in catalogue.result_files(name)]
    known = {file.parent.name for file in files} | {"matrix"}
    assert {folder.name for folder in RESULTS.iterdir()} == known
    assert {path for path in RESULTS.glob("*/*.json") if path not in files} == set()


def test_every_picture_shows_the_results_beside_it() -> None:
    drawn = list(RESULTS.glob("*/*.png"))
    assert len(drawn) > 5
    assert [path.name for path in drawn if not pictures.is_drawn(path)] == []


@pytest.mark.parametrize("name", catalogue.BENCHMARKS)
def test_the_sources_of_a_benchmark_exist(name: str) -> None:
    benchmark = catalogue.BENCHMARKS[name]
    of_algorithms = (source for sources in benchmark.algorithms.values() for source in sources)
    assert all((ROOT / source).exists() for source in (f"benchmarks/{name}.py", *benchmark.sources, *of_algorithms))


def test_only_lines_that_compute_count_in_a_fingerprint() -> None:
    source = (
        '"""Doc."""\nX = 1  # one\n\n# Why.\ndef f():\n    """Doc."""\n    return X\n\n\ndef table():\n    return 2\n'
    )
    assert list(catalogue.lines_that_compute(source, True)) == ["X = 1  # one", "def f():", "    return X"]
    assert list(catalogue.lines_that_compute(source, False))[3:] == ["def table():", "    return 2"]


@pytest.mark.parametrize("line", catalogue.MENDED_LINES)
def test_a_mended_line_counts_as_the_one_before(line: str) -> None:
    body = "\n".join(f"if True:\n    if True:\n{one}\n            pass" for one in (line, catalogue.MENDED_LINES[line]))
    new, old = list(catalogue.lines_that_compute(body, False))[2::4]
    assert new == old == catalogue.MENDED_LINES[line]
    assert any(line in file.read_text().splitlines() for file in (ROOT / "src").rglob("*.py"))


# ---------------------------------------------------------------------------------------------- result files


def test_rows_that_are_not_measured_again_stay_with_their_stamps(tmp_path: Path) -> None:
    path = tmp_path / "default_flags.json"
    path.write_text('{"old": [1], "both": [2]}')  # as it was before there were stamps
    file = ResultFile(path, {})
    assert file.stamped() == [("old", None), ("both", None)]
    assert not file.is_current("both")
    file.content["both"] = [3]
    file.content["new"] = [4]
    file.save("both", "new")
    again = ResultFile(path, {})
    assert again.content == read_content(path) == {"old": [1], "both": [3], "new": [4]}
    stamps = dict(again.stamped())
    assert stamps["old"] is None
    assert again.is_current("both")
    new = stamps["new"]
    assert new is not None
    assert new["cores"] >= 1
    assert new["sources"] == catalogue.fingerprint(catalogue.sources_of(path))
    assert {"date", "processor", "gpu", "others_percent", "versions"} < set(new)
    del again.content["both"]
    again.save()
    assert [row for row, known in stamps_in(path) if known] == ["new"]


def test_rows_of_other_systems_do_not_age_with_freerun() -> None:
    path = Path("masked_learning.json")
    ours, theirs = (catalogue.sources_of(path, row) for row in ("freerun with masks", "MaskablePPO"))
    assert "benchmarks/masked_learning.py" in theirs
    assert set(theirs) < set(ours)
    assert "src/freerun/algorithms/ppo/objective.py" in ours
    assert not [source for source in theirs if source.startswith("src/freerun/")]
    # A name within another one is another system.
    assert catalogue.sources_of(path, "freerun, as MaskablePPO") == ours


def test_a_row_depends_on_its_own_algorithm_alone() -> None:
    rows = ("hover, ppo, cuda", "explore, fastsac, 512 drones by trials, cuda", "explore, mbpo by trials, cuda")
    ppo, fastsac, mbpo = (catalogue.sources_of(Path("drone_learning.json"), row) for row in rows)
    folders = [f"src/freerun/algorithms/{name}" for name in ("fastsac", "mbpo")]
    assert [folder in ppo for folder in folders] == [False, False]
    assert [folder in fastsac for folder in folders] == [True, False]
    assert [folder in mbpo for folder in folders] == [True, True]  # --agent fast
    assert "src/freerun/algorithms/ppo/ppo.py" in ppo
    assert {"benchmarks/drone_learning.py", "src/freerun_envs/drone_sim.py"} <= set(ppo) & set(fastsac) & set(mbpo)


def test_rows_of_a_cpu_do_not_age_with_what_runs_on_gpus_alone() -> None:
    on_cpu, on_gpu = (catalogue.sources_of(Path(file)) for file in ("peers.json", "tensor_modes.json"))
    for source in ("src/freerun/algorithms/ppo/graphed_epochs.py", "src/freerun/collecting/tensors"):
        assert source in on_gpu
        assert not [other for other in on_cpu if other.startswith(source)]
    assert "src/freerun/algorithms/ppo/objective.py" in on_cpu


def test_every_system_that_is_named_as_another_one_has_rows() -> None:
    for name, benchmark in catalogue.BENCHMARKS.items():
        files = [path for path in catalogue.result_files(name) if path.exists()]
        rows = [row.split(", ") for path in files for row, _ in stamps_in(path)]
        for system in benchmark.others:
            assert any(system in parts for parts in rows), f"{name}: no row of {system}"


@dataclass
class Run:
    task: str
    seed: int
    score: float


def test_a_run_gets_its_stamp_once(tmp_path: Path) -> None:
    path = tmp_path / "atari_learning.json"
    path.write_text(json.dumps({"runs": [{"task": "old", "seed": 1, "score": 2.0}], "failures": []}))
    file = RunFile(path, Run)
    file.replace(Run("new", 1, 3.0), "task", "seed")
    content = json.loads(path.read_text())
    content["runs"][1]["stamp"]["date"] = "2001-01-01"
    path.write_text(json.dumps(content))
    again = RunFile(path, Run)
    again.replace(Run("newest", 1, 4.0), "task", "seed")
    assert again.records == [Run("old", 1, 2.0), Run("new", 1, 3.0), Run("newest", 1, 4.0)]
    old, new, newest = (known for _, known in stamps_in(path))
    assert old is None
    assert new is not None
    assert new["date"] == "2001-01-01"
    assert newest is not None
    assert newest["date"] > "2001-01-01"


def test_runs_of_other_sources_and_runs_without_a_stamp_are_not_current(tmp_path: Path) -> None:
    path = tmp_path / "atari_learning.json"
    path.write_text(json.dumps({"runs": [{"task": "old", "seed": 1, "score": 2.0}], "failures": []}))
    file = RunFile(path, Run)
    for task in ("changed", "new"):
        file.replace(Run(task, 1, 3.0), "task", "seed")
    content = json.loads(path.read_text())
    content["runs"][1]["stamp"]["sources"] = "other"
    path.write_text(json.dumps(content))
    again = RunFile(path, Run)
    again.records.append(Run("not saved yet", 1, 4.0))
    assert [one.task for one in again.records if again.is_current(one)] == ["new"]


def test_a_result_file_that_nobody_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"add it to benchmarks/catalogue\.py"):
        ResultFile(tmp_path / "unknown.json", {"row": 1}).save("row")


def test_results_of_other_settings_are_not_mixed() -> None:
    before = {"epochs": 4, "modes": {"sync": 1, "batch": 2}}
    assert merge(before, {"epochs": 4, "modes": {"batch": 3}}, "modes", "epochs") == {
        "epochs": 4,
        "modes": {"sync": 1, "batch": 3},
    }
    assert merge({}, before, "modes", "epochs") == before
    with pytest.raises(SystemExit, match="have epochs 4, these have 8: give another --output"):
        merge(before, {"epochs": 8, "modes": {}}, "modes", "epochs")


def test_a_page_says_how_each_row_was_measured(tmp_path: Path) -> None:
    one = {
        "date": "2026-11-18",
        "processor": "EPYC",
        "cores": 2,
        "gpu": "",
        "others_percent": 1.0,
        "versions": {"python": "3.11", "torch": "absent"},
        "sources": "ab12",
    }
    two = {**one, "others_percent": 4.5}
    text = conditions([("a", one), ("b", two), ("b", two), ("c", None)])
    assert "| a; b × 2 | 2026-11-18 | EPYC, 2 cores | 1 – 4.5 % | python 3.11 | ab12 |" in text
    assert "because they are older: c." in text
    assert write_report(tmp_path / "x.md", "# Title\n", [("c", None)]).startswith("# Title\n\nNo stamp (")


def test_stale_results_are_listed_with_the_command_that_renews_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "default_flags" / "default_flags.json"
    file = ResultFile(path, {"fresh": 1, "stale": 2, "old": 3})
    file.save("fresh", "stale")
    content = json.loads(path.read_text())
    content["stamps"]["stale"]["sources"] = "other"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path)
    monkeypatch.setattr(catalogue, "BENCHMARKS", {"default_flags": catalogue.BENCHMARKS["default_flags"]})
    monkeypatch.setattr(figures, "BENCHMARKS", catalogue.BENCHMARKS)
    assert list(figures.stale()) == [
        "default_flags/default_flags.json: 1 rows without fingerprint; python benchmarks/default_flags.py",
        "default_flags/default_flags.json: other sources for stale; python benchmarks/default_flags.py",
    ]


# ---------------------------------------------------------------------------------------------- benchmarks

Measured = dict[str, Any]
DEFENDERS = ("sleep", "random", "restore on sight")


def one_mode(content: Measured) -> Measured:
    return {**content, "modes": {"sync": content["modes"]["sync"]}}


def without_cyborg(content: Measured) -> Measured:
    scores = [{key: value for key, value in row.items() if key != "cyborg"} for row in content["scores"]]
    return {**{key: value for key, value in content.items() if key != "cyborg"}, "scores": scores}


@pytest.mark.parametrize(
    ("name", "file", "flags", "stand_ins", "measured"),
    [
        (
            "cyber",
            "cyber/cyber-networkdefence-v0.json",
            (),
            lambda found: {"run_all": lambda _: one_mode(found)},
            ["sync"],
        ),
        (
            "network_defence",
            "network_defence/network_defence.json",
            (),
            lambda found: {"measure": lambda _: without_cyborg(found)},
            [f"{red}, {blue}" for red in ("B_lineAgent", "RedMeanderAgent") for blue in DEFENDERS],
        ),
        (
            "peers",
            "peers/peers.json",
            ("--systems", "bare", "--workloads", "cartpole", "--fresh"),
            lambda found: {
                "version": lambda _: "1.0",
                "run_once": lambda *_: found["cases"][0]["samples"][0],
                "signal": SimpleNamespace(signal=lambda *_: None, SIGTERM=0),  # pytest keeps its own handlers
            },
            ["bare, cartpole"],
        ),
    ],
)
def test_a_benchmark_that_measures_some_rows_keeps_all_others(
    name: str,
    file: str,
    flags: tuple[str, ...],
    stand_ins: Callable[[Measured], dict[str, Any]],
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measuring itself, which takes minutes, is replaced by figures that are there."""
    path = tmp_path / Path(file).name
    # Without stamps, so that those that are there afterwards are new.
    path.write_text(json.dumps(read_content(RESULTS / file)), encoding="utf-8")
    module = importlib.import_module(name)
    for part, stand_in in stand_ins(read_content(path)).items():
        monkeypatch.setattr(module, part, stand_in)
    monkeypatch.setattr(sys, "argv", [name, *flags, "--output", str(tmp_path)])
    module.main()
    after = dict(stamps_in(path))
    assert [row for row, known in after.items() if known] == measured
    assert len(after) > len(measured)
    pages = [found.with_suffix(".md").read_text(encoding="utf-8") for found in (RESULTS / file, path)]
    before, now = (
        {
            (row.section, next(iter(row.cells.values())))
            for row in figures.rows_of(page)
            if "measured" not in row.cells  # the table of stamps
        }
        for page in pages
    )
    assert before <= now
