"""Does the workflow search find the best order? All 120 orders are trained for a reference; then searches are replayed.

Training the reference takes minutes and can be interrupted: the same command continues it, seed by seed, and makes
those again that were made with other sources. A replayed search gets, for each training that it asks for, the order's
mean score in the table plus a deviation that a seed of the table caused in some order. Seeds are used as a search uses
them: all orders' first trainings have the same one. So hundreds of searches take minutes, and the best order is known.

A search has found an order *within noise of the best* if the mean score of the order that it recommends lies at most
one standard deviation between seeds below the highest mean of the table. The rule was fixed before the table was
complete and before any search was replayed on it.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from pictures import is_drawn, make_plots, save
from run_file import ResultFile, RunFile, versions, write_report

from freerun.settings.defaults import complete
from freerun.settings.registry import make_config
from freerun.tools.workflow_search.order_model import OrderTrial
from freerun.tools.workflow_search.order_samplers import SAMPLERS
from freerun.tools.workflow_search.order_search import DEFAULTS, with_orders
from freerun.tools.workflow_search.order_trainer import OrderTrainer, TrainingJob
from freerun.tools.workflow_search.precedence import ORDERS

BUDGETS = (20, 30, 40)
NUM_SHOWN = 5
"""Orders that the report names at both ends of the table."""


@dataclass(frozen=True)
class Options:
    num_seeds: int = 2
    """Trainings of every order. Two are the least from which the noise between seeds can be seen."""
    time_limit: float = 1200.0
    """Begin no training after this many seconds."""
    trial_episodes: int = 50
    """Fresh episodes by which each training is judged."""
    num_repetitions: int = 200
    """Searches that are replayed, for every sampler and budget."""
    red_agent: str | None = None
    """Who attacks (B_lineAgent if not given)."""
    output: Path = Path(__file__).parent / "results" / "workflow_search"
    """Folder for workflow_search.json, .md and .png; trainings that are in there are not made again, if
    they were made with these sources."""
    report_only: bool = False
    """Train nothing, and replay the searches again."""


@dataclass(frozen=True)
class ReferenceTraining:
    """One training of the reference table."""

    order: str
    seed: int
    score: float
    compliance: float
    wall_seconds: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Reference:
    """The table as the replays see it."""

    scores: np.ndarray[tuple[int], np.dtype[np.float64]]
    """The mean score of each order."""
    deviations: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    """How far the trainings [seeds, orders] lie from the mean of their order, as large as if that were known."""

    @classmethod
    def of(cls, trainings: list[ReferenceTraining]) -> Reference | None:
        """Return the table of all seeds with which every order was trained; None if those are fewer than two."""
        scores = {(training.seed, training.order): training.score for training in trainings}
        seeds = [
            seed for seed in sorted({seed for seed, _ in scores}) if all((seed, name) in scores for name in ORDERS)
        ]
        if len(seeds) < 2:
            return None
        table = np.array([[scores[seed, name] for name in ORDERS] for seed in seeds])
        # Scores lie closer to the mean of n of them than to the true one: by the factor sqrt((n - 1) / n).
        return cls(table.mean(axis=0), (table - table.mean(axis=0)) * (len(seeds) / (len(seeds) - 1)) ** 0.5)

    @property
    def num_seeds(self) -> int:
        return len(self.deviations)

    @property
    def noise(self) -> float:
        """The standard deviation between trainings of one order with different seeds."""
        return float(np.mean(self.deviations**2) ** 0.5)

    @property
    def lost(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """By how much each order is worse than the best one."""
        lost: np.ndarray[tuple[int], np.dtype[np.float64]] = self.scores.max() - self.scores
        return lost

    @property
    def is_within_noise(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for each order that counts as found."""
        return self.lost <= self.noise


def train(file: RunFile[ReferenceTraining], options: Options) -> None:
    began = time.monotonic()
    known = {(training.order, training.seed) for training in file.records if file.is_current(training)}
    red_agent = {} if options.red_agent is None else {"red_agent": options.red_agent}
    config = dataclasses.replace(complete(make_config(with_orders({**DEFAULTS, **red_agent}))), quiet=True)
    trainer = OrderTrainer(config, options.trial_episodes)
    try:
        for seed, order in [(seed, order) for seed in range(options.num_seeds) for order in range(len(ORDERS))]:
            if (ORDERS[order], seed) in known:
                continue
            if time.monotonic() - began > options.time_limit:
                print(f"--time-limit is over: {len(known)} trainings so far; run it again for the others")
                return
            with tempfile.TemporaryDirectory() as scratch:
                figures = trainer.train(TrainingJob(0, order, seed, Path(scratch) / "run"))
            if figures is None:
                return  # interrupted
            row = (ORDERS[order], seed, figures["trial_return"], figures["compliance"], figures["wall_seconds"])
            known.add((ORDERS[order], seed))
            file.replace(ReferenceTraining(*row, versions()), "order", "seed")
            print(f"{len(known)}: seed {seed} {ORDERS[order]} {row[2]:.1f} in {row[4]:.1f} s", flush=True)
    finally:
        trainer.close()


def recommended(name: str, budget: int, repetition: int, reference: Reference) -> int:
    """Replay a search, and return the order that it recommends."""
    noise, sampler = np.random.default_rng([repetition, budget]), SAMPLERS[name](budget, repetition)
    deviations = noise.permutation(reference.deviations)  # of the first seed that is used, the second, …
    num_trained = [0] * len(ORDERS)
    finished: list[OrderTrial] = []
    for trial in range(budget):
        order = sampler.propose(finished, [], np.random.default_rng([repetition, trial]))
        assert order is not None
        deviation = noise.choice(deviations[num_trained[order] % reference.num_seeds])
        num_trained[order] += 1
        finished.append(OrderTrial(order, float(reference.scores[order] + deviation)))
    return sampler.best(finished)


def markdown(
    trainings: list[ReferenceTraining], reference: Reference, found: dict[tuple[str, int], list[int]], options: Options
) -> str:
    seconds = [training.wall_seconds for training in trainings]
    share = reference.is_within_noise.mean()
    shared = float(np.mean(reference.deviations.mean(axis=1) ** 2) ** 0.5)
    lines = [
        "# Workflow search beside random search and successive halving",
        "",
        f"Written by `benchmarks/workflow_search.py`: 120 orders with {reference.num_seeds} seeds, "
        f"{sum(seconds) / 60:.1f} minutes of training ({statistics.median(seconds):.1f} s each, median).",
        f"Scores of orders: {reference.scores.min():.1f} to {reference.scores.max():.1f}, standard deviation "
        f"{reference.scores.std():.1f}. Standard deviation between seeds of one order: {reference.noise:.1f}; standard "
        f"error of a mean of the table: {reference.noise / reference.num_seeds**0.5:.1f}. A seed has a part in this "
        f"that is the same for all orders: {shared:.1f}.",
        "",
        f"{options.num_repetitions} searches were replayed for each row. *Lost*: by how much the recommended order is "
        "worse than the best of the table, mean ± standard error. *Within noise*: searches that lost at most one "
        f"standard deviation between seeds ({reference.noise:.1f}), which is true of {share:.0%} of all orders.",
        "",
        "| trainings | sampler | lost | within noise | one of the best 12 | median rank |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for budget in BUDGETS:
        for name in SAMPLERS:
            orders = found[name, budget]
            hits = f"{reference.is_within_noise[orders].sum()} of {len(orders)}"
            ranks = np.array([1 + (reference.scores > reference.scores[order]).sum() for order in orders])
            mean, error = mean_and_error(reference.lost[orders])
            best = f"{(ranks <= len(ORDERS) // 10).mean():.0%} | {np.median(ranks):.0f}"
            lines.append(f"| {budget} | `{name}` | {mean:.2f} ± {error:.2f} | {hits} | {best} |")
    compliance = defaultdict(list)
    for training in trainings:
        compliance[training.order].append(training.compliance)
    ranked = sorted(range(len(ORDERS)), key=lambda order: -reference.scores[order])
    lines += ["", "The ends of the table:", "", "| rank | order | score | compliance |", "| ---: | --- | ---: | ---: |"]
    for rank, order in enumerate(ranked, start=1):
        if rank <= NUM_SHOWN or rank > len(ORDERS) - NUM_SHOWN:
            kept = statistics.mean(compliance[ORDERS[order]])
            name = ORDERS[order].replace(",", " › ")
            lines.append(f"| {rank} | {name} | {reference.scores[order]:.1f} | {kept:.0%} |")
    lines += ["", f"Versions: {', '.join(f'{name} {version}' for name, version in trainings[-1].versions.items())}."]
    return "\n".join(lines) + "\n"


def mean_and_error(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def draw(found: dict[tuple[str, int], list[int]], reference: Reference, path: Path) -> None:
    figure, (plot,) = make_plots(1, inches=(6.4, 4.2))
    for name in SAMPLERS:
        means, errors = zip(*(mean_and_error(reference.lost[found[name, budget]]) for budget in BUDGETS), strict=True)
        plot.errorbar(BUDGETS, means, yerr=errors, marker="o", capsize=3, label=name)
    plot.axhline(reference.noise, color="grey", linestyle=":", label="standard deviation between seeds")
    plot.set(xlabel="trainings", ylabel="score lost beside the best order", xticks=BUDGETS)
    plot.set_ylim(bottom=0)
    save(figure, path)


def search_name(sampler: str, budget: int) -> str:
    return f"{sampler}, {budget} trainings"


def open_searches(folder: Path) -> ResultFile:
    """The order, by its number, that each replayed search recommended. To replay them takes minutes."""
    return ResultFile(folder / "searches.json", {})


def write_reports(folder: Path) -> str:
    file, searches = RunFile(folder / "workflow_search.json", ReferenceTraining), open_searches(folder)
    picture, reference = folder / "workflow_search.png", Reference.of(file.records)
    assert reference is not None
    found = {(name, budget): searches.content[search_name(name, budget)] for name in SAMPLERS for budget in BUDGETS}
    if not is_drawn(picture):
        draw(found, reference, picture)
    text = markdown(file.records, reference, found, Options())
    return write_report(folder / "workflow_search.md", text, file.stamped(), searches.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = RunFile(options.output / "workflow_search.json", ReferenceTraining)
    if not options.report_only:
        train(file, options)
    reference = Reference.of(file.records)
    if reference is None:
        print("no report yet: it needs all 120 orders with two seeds")
        return
    searches = open_searches(options.output)
    for name in SAMPLERS:
        for budget in BUDGETS:
            orders = [recommended(name, budget, number, reference) for number in range(options.num_repetitions)]
            searches.content[search_name(name, budget)] = orders
    searches.save(*searches.content)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
