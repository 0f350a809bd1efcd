"""Which mode benchmarks/matrix.py advises, with numbers worked out by hand, and a measurement with `--run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from bench_results import case, results

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import matrix

    return matrix


def advised(matrix: Any, *cases: Any) -> tuple[str, str]:
    """The bare limit of ten workers is 1,000 ± 1 %."""
    folder = Path(cases[-1])
    results(*cases[:-1]).write(folder)
    measured = matrix.of_bench(folder)
    advice = matrix.advise(measured)
    return matrix.flags(advice.contender.label), matrix.why(measured, advice)


def test_the_fastest_is_advised_with_its_share_of_the_limit_and_the_next(matrix: Any, tmp_path: Path) -> None:
    mode, why = advised(
        matrix,
        case("sync", 10, 300, 310),
        case("freerun:segment_steps=25", 10, 900, 910),
        case("pipes", 10, 720, 728),
        tmp_path,
    )
    assert mode == "--mode freerun --segment-steps 25"
    assert why == "905 steps/s, 90 % of the bare limit; 1.25 × the next, `pipes`"


def test_within_the_noise_the_mode_that_auto_prefers_is_advised(matrix: Any, tmp_path: Path) -> None:
    mode, why = advised(
        matrix, case("sync", 10, 300, 310), case("freerun", 10, 890, 900), case("pipes", 10, 895, 905), tmp_path
    )
    assert mode == "--mode freerun"
    assert why == "895 steps/s, 90 % of the bare limit; within the noise of `pipes` (900); 2.9 × the next, `sync`"


def test_a_mode_that_drops_steps_is_named_but_not_advised(matrix: Any, tmp_path: Path) -> None:
    mode, why = advised(matrix, case("continuous", 10, 990, 995), case("batch", 10, 500, 505), tmp_path)
    assert mode == "--mode batch"
    assert "`continuous` made 992, but it drops steps" in why


def test_a_machine_that_was_noisy_is_not_hidden(matrix: Any, tmp_path: Path) -> None:
    _, why = advised(matrix, case("freerun", 10, 900, 910, others_percent=60.0), tmp_path)
    assert why.endswith("; the machine was noisy")


def test_the_committed_table_is_what_the_committed_results_say(matrix: Any) -> None:
    found = matrix.table(matrix.USE_CASES, BENCHMARKS / "results")
    committed = (BENCHMARKS / "results" / "matrix" / "matrix.md").read_text(encoding="utf-8")
    assert committed == found, "results have changed: python benchmarks/matrix.py writes the table anew"


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded_bench_jobs")
def test_what_is_missing_is_measured_and_the_table_written(
    matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = {"env": "CartPole-v1", "modes": "sequential,pipes", "workers": "1", "seconds": 0.2, "repeats": 1}
    case_of_test = matrix.UseCase("a toy", matrix.of_bench, "bench_toy", quick)
    monkeypatch.setattr(matrix, "USE_CASES", (case_of_test,))
    for words, num_reports in (([], 0), (["--run"], 1)):
        monkeypatch.setattr(sys, "argv", ["matrix.py", "--results", str(tmp_path), "--max-minutes", "0.5", *words])
        matrix.main()
        assert len(list(tmp_path.glob("bench_toy/report.json"))) == num_reports
        written = (tmp_path / "matrix" / "matrix.md").read_text(encoding="utf-8")
        assert ("Not measured yet: a toy" in written) == (num_reports == 0)
    assert "| a toy | `--mode " in written
