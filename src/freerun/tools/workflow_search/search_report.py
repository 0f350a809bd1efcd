"""What a search has found: all orders ranked, with their uncertainty, as JSON, Markdown, a table and a picture."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from freerun.persistence.files import write_atomically, write_json
from freerun.tools.plots.drawing import can_draw
from freerun.tools.workflow_search.order_model import Posterior, fit
from freerun.tools.workflow_search.order_samplers import OrderSampler
from freerun.tools.workflow_search.precedence import ORDERS, PAIRS, SIGNS
from freerun.tools.workflow_search.search_folder import SCORE, SearchFolder
from freerun_envs.workflow import GROUPS

logger = logging.getLogger("freerun")

RANKING, REPORT, PICTURE = "ranking.json", "ranking.md", "posterior.png"
MOST_SHOWN = 10
"""Orders that the table in the terminal shows."""
MOST_DRAWN = 25
"""Orders that the picture shows."""
COLUMNS = ("rank", "order", "expected score", "±", "trainings", "score", "compliance")


@dataclass(frozen=True)
class RankedOrder:
    """One of the 120 orders, and what is known about it."""

    order: str
    expected_score: float
    """The mean of the Gaussian process's posterior."""
    deviation: float
    """The standard deviation of the posterior."""
    num_trainings: int
    score: float | None
    """The mean score of its trainings; None if it was not trained."""
    compliance: float | None
    """The mean compliance of its trainings."""

    def cells(self, rank: int) -> list[str]:
        """Return the text of each of the COLUMNS."""
        score = "–" if self.score is None else f"{self.score:.1f}"
        compliance = "–" if self.compliance is None else f"{self.compliance:.0%}"
        expected = [f"{self.expected_score:.1f}", f"{self.deviation:.1f}"]
        return [str(rank), self.order.replace(",", " › "), *expected, str(self.num_trainings), score, compliance]


@dataclass(frozen=True)
class Precedence:
    """What it is worth to repair one group before another."""

    first: str
    second: str
    effect: float
    """The mean expected score of the 60 orders with `first` before `second`, minus that of the other 60."""
    deviation: float


@dataclass(frozen=True)
class WarmStartEffect:
    """The best training of a search with --warm-start, and the same one from nothing."""

    order: str
    seed: int
    warm_score: float
    cold_score: float


@dataclass(frozen=True)
class Ranking:
    """The result of a search."""

    best: str
    """The order that the sampler recommends."""
    orders: list[RankedOrder]
    """All orders, the highest expected score first."""
    precedences: list[Precedence]
    noise_deviation: float
    """The standard deviation between trials of one order, as the Gaussian process estimates it."""
    warm_start: WarmStartEffect | None = None


def write_report(folder: SearchFolder, sampler: OrderSampler) -> Ranking:
    """Rank all orders, and write the files of the report into the folder of the search."""
    finished = folder.finished()
    posterior = fit(finished)
    ranking = Ranking(
        ORDERS[sampler.best(finished)],
        _ranked(folder.counted, posterior),
        _precedences(posterior),
        posterior.noise_variance**0.5,
        _warm_start_effect(folder),
    )
    write_json(folder.path / RANKING, asdict(ranking))
    write_atomically(folder.path / REPORT, _markdown(ranking, len(finished)).encode())
    if can_draw():
        draw(ranking, folder.path / PICTURE)
    else:
        logger.warning("the picture of a search needs matplotlib: pip install 'freerun[plot]'")
    return ranking


def _ranked(lines: list[dict[str, Any]], posterior: Posterior) -> list[RankedOrder]:
    trainings: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        trainings[line["order"]].append(line)

    def mean(order: str, name: str) -> float | None:
        values = [line[name] for line in trainings[order]]
        return float(np.mean(values)) if values else None

    ranked = [
        RankedOrder(
            ORDERS[place],
            float(posterior.mean[place]),
            float(posterior.deviation[place]),
            len(trainings[ORDERS[place]]),
            mean(ORDERS[place], SCORE),
            mean(ORDERS[place], "compliance"),
        )
        for place in range(len(ORDERS))
    ]
    return sorted(ranked, key=lambda entry: -entry.expected_score)


def _precedences(posterior: Posterior) -> list[Precedence]:
    found = []
    for (first, second), signs in zip(PAIRS, SIGNS.T, strict=True):
        weights = signs / (len(ORDERS) / 2)  # a mean over one half of the orders minus a mean over the other half
        variance = max(0.0, float(weights @ posterior.covariance @ weights))
        found.append(Precedence(first, second, float(weights @ posterior.mean), variance**0.5))
    return found


def _warm_start_effect(folder: SearchFolder) -> WarmStartEffect | None:
    for cold in folder.lines:
        if cold not in folder.counted:
            same = [line for line in folder.counted if (line["order"], line["seed"]) == (cold["order"], cold["seed"])]
            return WarmStartEffect(cold["order"], cold["seed"], same[0][SCORE], cold[SCORE])
    return None


def summary_lines(ranking: Ranking) -> list[str]:
    """Return the sentences that stand above the table."""
    lines = [
        f"Best order: {ranking.best}",
        f"Trials of one order differ by {ranking.noise_deviation:.1f} (standard deviation, estimated).",
    ]
    if (warm := ranking.warm_start) is not None:
        lines.append(
            f"Warm start: {warm.order} with seed {warm.seed} scores {warm.warm_score:.1f}, and {warm.cold_score:.1f} "
            "if it is trained from nothing."
        )
    return lines


def _markdown(ranking: Ranking, num_trials: int) -> str:
    lines = [f"# Workflows, ranked after {num_trials} trials", "", *(f"- {line}" for line in summary_lines(ranking))]
    lines += ["", f"| {' | '.join(COLUMNS)} |", f"| ---: | --- |{' ---: |' * (len(COLUMNS) - 2)}"]
    lines += [f"| {' | '.join(entry.cells(rank))} |" for rank, entry in enumerate(ranking.orders, start=1)]
    lines += ["", "What it is worth to repair the first group before the second:", ""]
    lines += ["| first | second | effect | ± |", "| --- | --- | ---: | ---: |"]
    lines += [
        f"| {one.first} | {one.second} | {one.effect:+.1f} | {one.deviation:.1f} |" for one in ranking.precedences
    ]
    return "\n".join(lines) + "\n"


def print_ranking(ranking: Ranking, console: Console) -> None:
    """Print the best orders."""
    table = Table(title="Workflows", title_justify="left", box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "order" else "right", no_wrap=True)
    for rank, entry in enumerate(ranking.orders[:MOST_SHOWN], start=1):
        table.add_row(*entry.cells(rank))
    console.print(table)
    for line in summary_lines(ranking):
        console.print(line, highlight=False, soft_wrap=True)


def draw(ranking: Ranking, path: Path) -> None:
    """Draw the posterior by precedence, and the best orders with their uncertainty."""
    from matplotlib.figure import Figure

    groups = list(GROUPS)
    effects = np.full((len(groups), len(groups)), np.nan)
    figure = Figure(figsize=(14.0, 6.2), dpi=120, layout="constrained")
    matrix, best = figure.subplots(1, 2)
    for one in ranking.precedences:
        first, second = groups.index(one.first), groups.index(one.second)
        effects[first, second], effects[second, first] = one.effect, -one.effect
        for row, column, effect in ((first, second, one.effect), (second, first, -one.effect)):
            matrix.text(column, row, f"{effect:+.1f}\n± {one.deviation:.1f}", ha="center", va="center", fontsize=9)
    # Half as wide again as the effects are, because the text would be hard to read on the darkest colours.
    limit = 1.5 * float(np.nanmax(np.abs(effects))) or 1.0
    image = matrix.imshow(effects, cmap="RdBu", vmin=-limit, vmax=limit)
    figure.colorbar(image, ax=matrix, shrink=0.8, label="difference of the expected score")
    ticks = range(len(groups))
    matrix.set_xticks(ticks, groups, rotation=30)
    matrix.set_yticks(ticks, groups)
    matrix.set(title="Repairing the row before the column", xlabel="later", ylabel="earlier")

    shown = ranking.orders[:MOST_DRAWN][::-1]
    for place, entry in enumerate(shown):
        best.errorbar(entry.expected_score, place, xerr=entry.deviation, fmt="o", color="#2f6fde", markersize=4)
        if entry.score is not None:
            best.plot(entry.score, place, "x", color="#d9822b")
    best.set_yticks(range(len(shown)), [entry.order.replace(",", " › ") for entry in shown], fontsize=7)
    best.set(title="Expected score ± deviation (× measured)", xlabel="score")
    best.grid(alpha=0.3)
    best.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
