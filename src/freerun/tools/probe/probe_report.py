"""Shows a probe in words, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from freerun.collecting.modes.continuous import THREADS_PAY_OFF
from freerun.core import Demand, callable_name
from freerun.settings.registry import MODES, find_mode
from freerun.tools.probe.auto_mode import Probe, sentence, why
from freerun.tools.probe.forecast import WAITS_BELOW, Forecast, vector_seconds
from freerun.tools.probe.measure import Config
from freerun.tools.probe.measurement import Environment
from freerun.tools.probe.predict import expected_max, overlap_ceiling

HEAVY_TAIL = 3.0
"""A 99th percentile of at least this many times the median is reported."""


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, some percentiles and the maximum."""
    found = np.array(values)
    quantiles = {f"p{percent}": float(np.percentile(found, percent)) for percent in (50, 95, 99)}
    return {"mean": float(found.mean()), **quantiles, "max": float(found.max())}


def shown(seconds: float) -> str:
    """Write a time with three digits, in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def command(best: Forecast, words: Sequence[str]) -> str:
    """The command to type: the words that the probe was given, and what it found."""
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    found = {"--mode": best.mode}
    if count := find_mode(best.mode).traits.workers_flag:
        found[count] = str(best.num_workers)
    added = [word for flag, value in found.items() if flag not in given for word in (flag, value)]
    return shlex.join(["freerun", "train", *words, *added])


def findings(probe: Probe) -> list[str]:
    """What is worth knowing, one sentence each."""
    measured, env = probe.measured, probe.measured.environment
    steps = statistics(env.step_seconds)
    found = []
    if env.is_unsure:
        found.append(
            f"The machine is too busy to tell: other programs had the core for {100 * env.stolen_share:.0f} % of the "
            "time. Steps look slower than they are. Probe again when the machine is quiet."
        )
    elif env.cpu_share < WAITS_BELOW:
        found.append(
            f"Steps sleep or wait: they use {100 * env.cpu_share:.0f} % of a core, so workers may outnumber cores."
        )
    else:
        found.append(
            f"Steps compute: they use {100 * env.cpu_share:.0f} % of a core. {measured.cores} cores are worth "
            f"{measured.parallel_cores:.1f} of one at once."
        )
    tail = steps["p99"] / max(steps["p50"], 1e-9)
    if tail >= HEAVY_TAIL:
        found.append(
            f"The tail is heavy: one step in a hundred takes {tail:.1f} times the median or more. A barrier of 10 "
            f"environments waits {expected_max(env.step_seconds, 10) / steps['mean']:.1f} times the mean for each "
            f"step, one of 100 {expected_max(env.step_seconds, 100) / steps['mean']:.1f} times."
        )
    else:
        found.append(f"Step times are even: the 99th percentile is {tail:.1f} times the median.")
    found.append(_about_episodes(env))
    if env.threads_speed_up is not None:
        says = "leaves" if env.threads_speed_up >= THREADS_PAY_OFF else "mostly holds"
        found.append(f"It {says} Python's lock while it steps: two threads step {env.threads_speed_up:.1f} × as fast.")
    found.append(_about_overlap(probe))
    return [sentence for sentence in found if sentence]


def _about_episodes(env: Environment) -> str:
    if env.episode_lengths:
        return f"Episodes of an untrained policy take {np.mean(env.episode_lengths):,.0f} steps on average."
    if env.time_limit:
        return (
            f"No episode ended while it was tried out; its time limit of {env.time_limit:,} steps is taken for granted."
        )
    return (
        f"No episode has ended in {len(env.step_seconds):,} steps: modes that hand over whole episodes would wait for "
        "ever. Give --max-episode-steps."
    )


def _about_overlap(probe: Probe) -> str:
    measured = probe.measured
    mode = probe.best.mode
    update = measured.updates[mode]
    demand = Demand(**update.demand)
    collect = update.steps * vector_seconds(measured.environment, 1)[0]
    ceiling = overlap_ceiling(collect, update.seconds)
    wanted = f"{demand.episodes:,} episodes" if demand.episodes else f"{update.steps:,} steps"
    return (
        f"An update learns from {wanted} in {shown(update.seconds)}; one worker collects them in {shown(collect)}. "
        f"With one worker, doing both at once is worth × {ceiling:.2f} at most; a step costs "
        f"{shown(update.seconds / update.steps)} to learn from, however many collect."
    )


def to_json(probe: Probe, config: Config, words: Sequence[str]) -> str:
    measured, env = probe.measured, probe.measured.environment
    best = probe.best
    return json.dumps(
        {
            "env": callable_name(config.env),
            "algo": config.algo,
            "environment": {
                "construct_seconds": env.construct_seconds,
                "reset_seconds": statistics(env.reset_seconds),
                "step_seconds": statistics(env.step_seconds),
                "cpu_share": env.cpu_share,
                "stolen_share": env.stolen_share,
                "mean_episode_steps": env.mean_length,
                "worker_megabytes": env.megabytes,
                "loop_seconds": env.loop_seconds,
                "threads_speed_up": env.threads_speed_up,
                "seconds_per_step_by_envs": {size: pair[0] for size, pair in env.vectors.items()},
            },
            "inference_seconds": {"alone": measured.inference_seconds, "of_64": measured.batched_inference_seconds},
            "machine": {"cores": measured.cores, "parallel_cores": measured.parallel_cores},
            "device": config.device,
            "updates": {mode: dataclasses.asdict(update) for mode, update in measured.updates.items()},
            "overheads": {mode: dataclasses.asdict(cost) for mode, cost in measured.overheads.items()},
            "findings": findings(probe),
            "predictions": [dataclasses.asdict(found) for found in probe.forecasts],
            "refused": probe.refused,
            "recommendation": {
                "mode": best.mode,
                "num_workers": best.num_workers,
                "steps_per_second": best.steps_per_second,
                "why": why(best, env),
                "command": command(best, words),
            },
            "probe_seconds": measured.took_seconds,
        },
        indent=1,
    )


def print_report(probe: Probe, config: Config, console: Console, words: Sequence[str]) -> None:
    measured, env = probe.measured, probe.measured.environment
    console.print(f"[bold]{callable_name(config.env)}[/bold], {config.algo} on {config.device}", highlight=False)
    console.print(_times(env))
    console.print(
        f"Construct {shown(env.construct_seconds)}, {env.megabytes:.0f} MB per worker; inference "
        f"{shown(measured.inference_seconds)} alone, {shown(measured.batched_inference_seconds)} per environment in a "
        "batch of 64.",
        highlight=False,
    )
    for text in findings(probe):
        console.print(f"· {text}", highlight=False, markup=False)
    console.print(_predictions(probe))
    for mode, reason in probe.refused.items():
        console.print(f"{mode} is left out: {reason}", highlight=False, markup=False)
    label, style = ("Best guess: ", "yellow") if env.is_unsure else ("Recommended: ", "bold green")
    console.print(sentence(probe).replace("auto: ", label, 1) + ".", style=style, highlight=False)
    console.print(command(probe.best, words), highlight=False, markup=False, soft_wrap=True)
    kept = "not kept, for the machine is busy" if env.is_unsure else "kept for --mode auto"
    console.print(f"(probed in {measured.took_seconds:.0f} s; {kept})", style="dim", highlight=False)


def _times(env: Environment) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("mean", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for name, values in (("step", env.step_seconds), ("reset", env.reset_seconds)):
        table.add_row(name, *(shown(value) for value in statistics(values).values()))
    return table


def _predictions(probe: Probe) -> Table:
    """A row per mode, a column per number of workers; the recommended cell stands out."""
    best = probe.best
    found_modes = dict.fromkeys(found.mode for found in probe.forecasts)
    # In the order of the registry; modes of the user's own come last.
    modes = sorted(found_modes, key=lambda mode: [*MODES, *found_modes].index(mode))
    counts = sorted({found.num_workers for found in probe.forecasts})
    by_place = {(found.mode, found.num_workers): found for found in probe.forecasts}
    table = Table(box=box.SIMPLE_HEAD, title="predicted steps/s by number of workers", title_justify="left")
    table.add_column("mode")
    for count in counts:
        table.add_column(str(count), justify="right")
    table.add_column("episodes/s", justify="right")
    table.add_column("learner busy", justify="right")
    for mode in modes:
        cells = []
        for count in counts:
            found = by_place.get((mode, count))
            rate = found and found.steps_per_second
            text = f"{rate:,.0f}" if rate else "–" if found else ""
            cells.append(f"[bold green]{text}[/]" if found is best else text)
        most = probe.of(mode)
        episodes = f"{most.episodes_per_second:,.1f}" if most and most.episodes_per_second else "–"
        busy = f"{100 * most.learner_busy:.0f} %" if most and most.learner_busy is not None else "–"
        table.add_row(mode, *cells, episodes, busy)
    notes = {found.note for found in probe.forecasts if found.note}
    reasons = {mode: find_mode(mode).traits.why_not_auto for mode in modes}
    asked = [f"{mode} is chosen only if asked for: {reason}" for mode, reason in reasons.items() if reason]
    table.caption = "; ".join([*sorted(notes), *asked])
    table.caption_justify = "left"
    return table
