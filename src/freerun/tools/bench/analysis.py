"""Turns measured runs into the rows, limits and sentences of the reports."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freerun.persistence.redaction import without_secrets
from freerun.tools.bench import noise
from freerun.tools.bench.bench_job import BARE, LEARNING_RATE, ONLY_MEASURED
from freerun.tools.bench.noise import Range
from freerun.tools.bench.results import SEQUENTIAL, Case, Results

MANY_EPISODES = 100_000
"""The reports say how long this many episodes would take."""


@dataclass(frozen=True)
class Limits:
    """The steps per second that a number of workers cannot exceed."""

    bare: Range
    """Lowest, median and highest rate of as many processes that only step environments."""
    bare_runs: tuple[float, ...]
    cores: float | None
    """The rate if no environment slowed another down, or what the cores can compute, whichever is lower; None for
    environments that are tensors, which one process steps."""

    @property
    def spread(self) -> float | None:
        """How far the runs of the bare limit lie apart, as a share of their median."""
        return noise.relative_spread(self.bare_runs)


@dataclass(frozen=True)
class ReportRow:
    """One line of the table: a mode with a number of workers."""

    label: str
    num_workers: int
    num_runs: int
    steps: Range
    """Steps per second: the lowest, the median and the highest of the runs."""
    rate: Range
    """The same, but at least as wide as the noise of the machine. Two modes differ where these ranges lie apart."""
    episodes: float
    """Episodes per second."""
    speed_up: float | None
    """The rate divided by that of `sequential`; None where that was not measured."""
    speed_up_called: bool
    """True where the speed-up is larger than the noise."""
    of_bare: float
    of_cores: float | None
    startup_seconds: float
    memory_megabytes: float
    cpu_percent: float
    many_episodes_seconds: float
    """The time that 100,000 episodes would take, including the start."""
    workers_busy: float
    learner_busy: float
    dropped_steps: float
    steps_per_update: int
    standing: str
    """`fastest`, `as fast` where the difference to the fastest lies within the noise, or `slower`."""


def limits(results: Results, num_workers: int) -> Limits | None:
    """Return the limits for a number of workers; None where the bare limit was not measured."""
    bare, alone = results.case(BARE, num_workers), _alone(results, num_workers)
    if bare is None or alone is None or not bare.runs or not alone.runs:
        return None
    runs = bare.values("steps_per_second")
    bare_range = Range(min(runs), statistics.median(runs), max(runs))
    if results.options.is_tensors:
        return Limits(bare_range, tuple(runs), None)
    # One worker has the machine for itself: its rate and its CPU time show what a step costs without contention.
    single_rate = statistics.median(alone.values("steps_per_second"))
    cpu_seconds = statistics.median(alone.values("cpu_seconds_per_step"))
    # All cores together can compute num_cores / (CPU seconds of one step) steps per second.
    computable_rate = results.machine["cores"] / cpu_seconds if cpu_seconds > 0 else float("inf")
    return Limits(bare_range, tuple(runs), min(num_workers * single_rate, computable_rate))


def _alone(results: Results, num_workers: int) -> Case | None:
    """The bare limit of a single worker; that of the simulator itself, where environments are tensors."""
    return results.case(BARE, num_workers if results.options.is_tensors else 1)


def rows(results: Results, num_workers: int) -> list[ReportRow]:
    """Return a row for each mode that was measured with this number of workers, the fastest first."""
    limit = limits(results, num_workers)
    cases = results.measured_with(num_workers)
    if limit is None or not cases:
        return []
    # The bare limit does the same work in every run, so its spread is the noise of the machine.
    rates = {case.name: Range.of(case.values("steps_per_second"), limit.spread) for case in cases}
    best = max(rates.values(), key=lambda rate: rate.middle)
    sequential = results.case(SEQUENTIAL, 1)
    base = rates[sequential.name] if sequential is not None and sequential.runs else None
    alone = _alone(results, num_workers)
    assert alone is not None
    episode_steps = statistics.median(alone.values("episode_steps"))
    made = [_row(case, limit, rates[case.name], best, base, episode_steps) for case in cases]
    return sorted(made, key=lambda row: -row.steps.middle)


def _row(case: Case, limit: Limits, rate: Range, best: Range, base: Range | None, episode_steps: float) -> ReportRow:
    def median(name: str) -> float:
        return float(statistics.median(run.get(name, 0.0) for run in case.runs))

    steps = case.values("steps_per_second")
    # Where no episode ended during the measurement, the rate follows from the usual length of an episode.
    episodes = median("episodes_per_second") or rate.middle / episode_steps
    return ReportRow(
        label=case.label,
        num_workers=case.num_workers,
        num_runs=len(case.runs),
        steps=Range(min(steps), rate.middle, max(steps)),
        rate=rate,
        episodes=episodes,
        speed_up=None if base is None else rate.middle / base.middle,
        speed_up_called=base is not None and (rate.is_above(base) or base.is_above(rate)),
        of_bare=rate.middle / limit.bare.middle,
        of_cores=None if limit.cores is None else rate.middle / limit.cores,
        startup_seconds=median("startup_seconds"),
        memory_megabytes=median("memory_megabytes"),
        cpu_percent=median("cpu_percent"),
        many_episodes_seconds=median("startup_seconds") + MANY_EPISODES / episodes,
        workers_busy=median("workers_busy_share"),
        learner_busy=median("learner_updating_share"),
        dropped_steps=median("dropped_steps"),
        steps_per_update=case.steps_per_update,
        standing="fastest" if rate is best else "slower" if best.is_above(rate) else "as fast",
    )


# ---------------------------------------------------------------------------------------------- noise


@dataclass(frozen=True)
class MachineNoise:
    """How much the machine itself disturbed the measurements."""

    spread: float | None
    """The largest spread of a bare limit; None if each was measured once."""
    others_mean: float
    """Percent of all cores that other programs used during the measurements, on average."""
    others_most: float
    """The same, at most."""

    @property
    def word(self) -> str:
        return noise.noise_word(self.spread, self.others_mean / 100)

    def __str__(self) -> str:
        if self.spread is None:
            spread = "The bare limit was measured once, so its spread is not known"
        else:
            spread = f"The bare limit varied by {percent(self.spread)} between its runs"
        others = f"other programs took {self.others_mean:.0f} % of the cores (at most {self.others_most:.0f} %)"
        advice = " Close other programs and measure again before you trust small differences."
        return f"The machine was {self.word}. {spread}, and {others}.{'' if self.word == 'quiet' else advice}"


def machine_noise(results: Results) -> MachineNoise | None:
    """Return how noisy the machine was over all runs; None before the first."""
    others = [run["others_percent"] for case in results.cases for run in case.runs]
    if not others:
        return None
    bare = [case.values("steps_per_second") for case in results.cases if case.is_bare]
    # The worst spread counts, because a machine that was noisy once may have been so in other runs.
    spreads = [spread for runs in bare if (spread := noise.relative_spread(runs)) is not None]
    return MachineNoise(max(spreads, default=None), statistics.mean(others), max(others))


# ---------------------------------------------------------------------------------------------- words


def verdict(results: Results, num_workers: int) -> str:
    """Say which mode is the fastest with this number of workers, as far as the noise allows."""
    table, number = rows(results, num_workers), number_text(results, num_workers)
    if not table:
        return f"With {number} nothing was measured."
    best, *others = table
    rate = f"{best.steps.middle:,.0f} steps/s, {percent(best.of_bare)} of the bare limit"
    equals = [row for row in others if row.standing == "as fast"]  # they cannot be told apart from the fastest
    if not others:
        return f"With {number} only {best.label} was measured: {rate}."
    if equals:
        names = ", ".join(f"{row.label} ({row.steps.middle:,.0f})" for row in equals)
        return (
            f"With {number} {best.label} came out highest ({rate}), "
            f"but its difference to {names} lies within the noise."
        )
    more = ""
    if best.speed_up is not None and best.label != SEQUENTIAL and best.speed_up_called:
        more = f", {factor(best.speed_up)} sequential"
    return (
        f"With {number} {best.label} is the fastest: {rate}{more}; "
        f"{factor(best.steps.middle / others[0].steps.middle)} the next, {others[0].label}."
    )


def all_rows(results: Results) -> list[ReportRow]:
    """Return the rows of all numbers of workers, each mode and number once, the fastest first."""
    # `sequential` has a row for every number of workers; by its name and its own number it counts once.
    found = {(row.label, row.num_workers): row for number in results.options.numbers() for row in rows(results, number)}
    return sorted(found.values(), key=lambda row: -row.steps.middle)


def recommended(results: Results) -> ReportRow | None:
    """Return the row that is faster than every other by more than the noise; None if there is none."""
    table = all_rows(results)
    if len(table) > 1 and all(table[0].rate.is_above(other.rate) for other in table[1:]):
        return table[0]
    return None


def recommendation(results: Results) -> tuple[str, str | None]:
    """Return a sentence, and the command to type where one mode can be recommended."""
    table, best = all_rows(results), recommended(results)
    if best is not None:
        return (
            "To train in the fastest mode, with all settings that were measured except the learning rate "
            f"(it was {LEARNING_RATE:g}, so that the policy does not change):",
            command(results, best),
        )
    if len(table) < 2:
        return "Nothing is recommended, because there is nothing to compare.", None
    equals = [_mode_and_workers(results, row) for row in table[1:] if not table[0].rate.is_above(row.rate)]
    return (
        f"Nothing is recommended: {_mode_and_workers(results, table[0])} came out highest, "
        f"but its difference to {', '.join(equals)} lies within the noise.",
        None,
    )


def _mode_and_workers(results: Results, row: ReportRow) -> str:
    return row.label if row.label == SEQUENTIAL else f"{row.label} with {number_text(results, row.num_workers)}"


def command(results: Results, row: ReportRow) -> str:
    """Return the command that trains with the settings that were measured."""
    case = results.case(row.label, row.num_workers)
    assert case is not None
    words = ["freerun", "train", results.options.env]
    for name, value in without_secrets(results.job(case).config()).items():
        if name != "env" and name not in ONLY_MEASURED:
            words += _flag(name, value)
    return shlex.join(words)  # with quotes around arguments that a shell would split


def _flag(name: str, value: Any) -> list[str]:
    """Return a setting as words of a command line; no words for a setting without a value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, Mapping):  # --env-args takes names and values in turn
        value = [part for pair in value.items() for part in pair]
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [f"--{flag}", *map(str, values)] if values else []


def left_out(results: Results) -> list[str]:
    """Say what is missing from the tables, and why; cases with the same reason share a sentence."""
    by_case: dict[tuple[str, str], list[int]] = {}
    for case in results.cases:
        if not case.runs:
            why = case.problem or "the time was up; --max-minutes gives it more, --resume continues"
            by_case.setdefault((case.label, f"left out: {why}"), []).append(case.num_workers)
        elif len(case.runs) < results.options.repeats:
            times = "once" if len(case.runs) == 1 else f"{len(case.runs)} times"
            words = f"measured only {times}: {case.problem or 'the time was up'}"
            by_case.setdefault((case.label, words), []).append(case.num_workers)
    numbers = set(results.options.numbers())
    notes: dict[str, list[str]] = {}
    for (label, words), workers in by_case.items():
        # A reason that holds for all numbers of workers need not name them.
        everywhere = label == SEQUENTIAL or set(workers) >= numbers
        several = f"{', '.join(map(str, workers))} {counted(results)}s"
        numbered = number_text(results, workers[0]) if len(workers) == 1 else several
        where = "" if everywhere else f" with {numbered}"
        notes.setdefault(words, []).append(f"{label}{where}")
    return [f"{', '.join(labels)}: {words}" for words, labels in notes.items()]


def counted(results: Results) -> str:
    """What the numbers of a bench count."""
    return "environment" if results.options.is_tensors else "worker"


def number_text(results: Results, number: int) -> str:
    """Write a number of workers, or of environments that are tensors."""
    return f"{number:,} {counted(results)}{'' if number == 1 else 's'}"


def workers_text(num_workers: int) -> str:
    return "1 worker" if num_workers == 1 else f"{num_workers:,} workers"


def factor(ratio: float) -> str:
    """Write a ratio with about three digits."""
    return f"{ratio:,.0f} ×" if ratio >= 20 else f"{ratio:.1f} ×" if ratio >= 2 else f"{ratio:.2f} ×"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def clock(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
