"""From runs to what may be said: rows of the table, limits, noise, and sentences."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from freerun.benching import noise
from freerun.benching.job import BARE
from freerun.benching.noise import Range
from freerun.benching.options import read_mode
from freerun.benching.results import SEQUENTIAL, Case, Results

MANY_EPISODES = 100_000


@dataclass(frozen=True)
class Limits:
    """Steps per second that cannot be exceeded with so many workers."""

    bare: Range
    bare_runs: tuple[float, ...]
    cores: float
    """As many environments as workers, if none got in another's way, or what the cores can compute: the lower."""

    @property
    def spread(self) -> float | None:
        return noise.spread(self.bare_runs)


@dataclass(frozen=True)
class Row:
    label: str
    num_workers: int
    num_runs: int
    steps: Range
    """Per second: lowest, median and highest of the runs."""
    episodes: float
    speed_up: float | None
    """Over sequential."""
    speed_up_called: bool
    of_bare: float
    of_cores: float
    startup_seconds: float
    memory_megabytes: float
    cpu_percent: float
    many_episodes_seconds: float
    """For 100,000 episodes, with the start."""
    workers_busy: float
    learner_busy: float
    dropped_steps: float
    steps_per_update: int
    standing: str
    """fastest; as fast, where no difference to it can be called; or slower."""


def limits(results: Results, num_workers: int) -> Limits | None:
    bare, alone = results.case(BARE, num_workers), results.case(BARE, 1)
    if bare is None or alone is None or not bare.runs or not alone.runs:
        return None
    runs = bare.values("steps_per_second")
    lone = statistics.median(alone.values("steps_per_second"))
    cpu_seconds = statistics.median(alone.values("cpu_seconds_per_step"))
    can_compute = results.machine["cores"] / cpu_seconds if cpu_seconds > 0 else float("inf")
    plain = Range(min(runs), statistics.median(runs), max(runs))
    return Limits(plain, tuple(runs), min(num_workers * lone, can_compute))


def rows(results: Results, num_workers: int) -> list[Row]:
    """Of everything that was measured with so many workers, the fastest first."""
    found = limits(results, num_workers)
    cases = results.of(num_workers)
    if found is None or not cases:
        return []
    rates = {case.name: Range.of(case.values("steps_per_second"), found.spread) for case in cases}
    best = max(rates.values(), key=lambda rate: rate.middle)
    sequential = results.case(SEQUENTIAL, 1)
    base = rates[sequential.name] if sequential is not None and sequential.runs else None
    alone = results.case(BARE, 1)
    assert alone is not None
    episode_steps = statistics.median(alone.values("episode_steps"))
    made = [_row(case, found, rates[case.name], best, base, episode_steps) for case in cases]
    return sorted(made, key=lambda row: -row.steps.middle)


def _row(case: Case, limit: Limits, rate: Range, best: Range, base: Range | None, episode_steps: float) -> Row:
    def median(name: str) -> float:
        return float(statistics.median(run.get(name, 0.0) for run in case.runs))

    steps = case.values("steps_per_second")
    episodes = (
        median("episodes_per_second") or rate.middle / episode_steps
    )  # where none has ended while it was measured
    return Row(
        case.label,
        case.num_workers,
        len(case.runs),
        Range(min(steps), rate.middle, max(steps)),
        episodes,
        None if base is None else rate.middle / base.middle,
        base is not None and (rate.is_above(base) or base.is_above(rate)),
        rate.middle / limit.bare.middle,
        rate.middle / limit.cores,
        median("startup_seconds"),
        median("memory_megabytes"),
        median("cpu_percent"),
        median("startup_seconds") + MANY_EPISODES / episodes,
        median("workers_busy_share"),
        median("learner_updating_share"),
        median("dropped_steps"),
        case.steps_per_update,
        "fastest" if rate is best else "slower" if best.is_above(rate) else "as fast",
    )


# ---------------------------------------------------------------------------------------------- noise


@dataclass(frozen=True)
class Noise:
    """How far the machine was to be trusted."""

    spread: float | None
    """The worst of the bare limits; None if each was measured once."""
    others_mean: float
    others_most: float
    """Percent of all cores that other programs took while something was measured."""

    @property
    def word(self) -> str:
        return noise.told(self.spread, self.others_mean / 100)

    def __str__(self) -> str:
        if self.spread is None:
            told = "The bare limit was measured once, so its spread is not known"
        else:
            told = f"The bare limit varied by {percent(self.spread)} between its runs"
        others = f"other programs took {self.others_mean:.0f} % of the cores (at most {self.others_most:.0f} %)"
        advice = (
            ""
            if self.word == "quiet"
            else " Close other programs and measure again before you trust small differences."
        )
        return f"The machine was {self.word}. {told}, and {others}.{advice}"


def machine_noise(results: Results) -> Noise | None:
    others = [run["others_percent"] for case in results.cases for run in case.runs]
    if not others:
        return None
    bare = [case.values("steps_per_second") for case in results.cases if case.is_bare]
    spreads = [found for runs in bare if (found := noise.spread(runs)) is not None]
    return Noise(max(spreads, default=None), statistics.mean(others), max(others))


# ---------------------------------------------------------------------------------------------- words


def verdict(results: Results, num_workers: int) -> str:
    """Who is fastest with so many workers, as far as that can be said."""
    table = rows(results, num_workers)
    if not table:
        return f"With {counted(num_workers)} nothing was measured."
    best, *others = table
    rate = f"{best.steps.middle:,.0f} steps/s, {percent(best.of_bare)} of the bare limit"
    equals = [row for row in others if row.standing == "as fast"]
    if not others:
        return f"With {counted(num_workers)} only {best.label} was measured: {rate}."
    if equals:
        names = ", ".join(f"{row.label} ({row.steps.middle:,.0f})" for row in equals)
        return (
            f"With {counted(num_workers)} {best.label} came out highest ({rate}), but no difference to {names} can be "
            "called: it lies within the noise."
        )
    more = ""
    if best.speed_up is not None and best.label != SEQUENTIAL and best.speed_up_called:
        more = f", {factor(best.speed_up)} sequential"
    return (
        f"With {counted(num_workers)} {best.label} is the fastest: {rate}{more}; "
        f"{factor(best.steps.middle / others[0].steps.middle)} the next, {others[0].label}."
    )


def best_row(results: Results) -> Row | None:
    """Over all numbers of workers."""
    table = [row for number in results.options.numbers() for row in rows(results, number)]
    return max(table, key=lambda row: row.steps.middle, default=None)


def command(results: Results, row: Row) -> str:
    """What to type to train that way."""
    mode, settings = read_mode(row.label)
    flags: dict[str, Any] = {"--mode": mode}
    if mode == "continuous":
        flags |= {"--num-collectors": row.num_workers, "--num-envs": row.num_workers}
    elif mode == "batch":
        flags |= {"--num-envs": row.num_workers}
    elif mode != SEQUENTIAL:
        flags |= {"--num-workers": row.num_workers}
    flags |= {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    words = [f"{flag} {value}" for flag, value in flags.items()]
    if results.options.env_args:
        words.append("--env-args " + " ".join(f"{name} {value}" for name, value in results.options.env_args.items()))
    if results.options.max_episode_steps is not None:
        words.append(f"--max-episode-steps {results.options.max_episode_steps}")
    return f"freerun train {results.options.env} {' '.join(words)}"


def left_out(results: Results) -> list[str]:
    """What is missing from the tables, and why."""
    by_case: dict[tuple[str, str], list[int]] = {}
    for case in results.cases:
        if not case.runs:
            why = case.problem or "the time was up; --max-minutes gives it more, --resume goes on"
            by_case.setdefault((case.label, f"left out: {why}"), []).append(case.num_workers)
        elif len(case.runs) < results.options.repeats:
            times = "once" if len(case.runs) == 1 else f"{len(case.runs)} times"
            words = f"measured only {times}: {case.problem or 'the time was up'}"
            by_case.setdefault((case.label, words), []).append(case.num_workers)
    numbers = set(results.options.numbers())
    notes: dict[str, list[str]] = {}
    for (label, words), workers in by_case.items():
        everywhere = label == SEQUENTIAL or set(workers) >= numbers
        where = "" if everywhere else f" with {', '.join(map(str, workers))} workers"
        notes.setdefault(words, []).append(f"{label}{where}")
    return [f"{', '.join(labels)}: {words}" for words, labels in notes.items()]


def counted(num_workers: int) -> str:
    return "1 worker" if num_workers == 1 else f"{num_workers:,} workers"


def factor(ratio: float) -> str:
    return f"{ratio:,.0f} ×" if ratio >= 20 else f"{ratio:.1f} ×" if ratio >= 2 else f"{ratio:.2f} ×"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
