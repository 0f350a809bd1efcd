"""Shows a probe in words, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from freerun.collecting.modes.continuous import THREADS_PAY_OFF
from freerun.core import Demand, callable_name
from freerun.settings.registry import MODES, find_mode
from freerun.telemetry.advice import SLOW_ACTION_SECONDS
from freerun.tools.probe.auto_mode import Probe, enough_of, sentence, why
from freerun.tools.probe.candidates import FEWEST_UPDATES, SLOTS_PER_WORKER, WAITS_BELOW
from freerun.tools.probe.forecast import Forecast
from freerun.tools.probe.measure import Config
from freerun.tools.probe.measurement import Environment, Measurement, TensorMeasurement, vector_seconds
from freerun.tools.probe.predict import expected_max, overlap_ceiling
from freerun.tools.probe.update_costs import update_cost

LARGE_STEP_BYTES, USUAL_SEGMENT = 4_000, 128
"""Steps of this size, such as those with images, fill the memory before anything else does."""
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
    found = {"mode": best.mode, **best.settings}
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in found.items() if not _is_usual(best, name)}
    added = [word for flag, value in flags.items() if flag not in given for word in (flag, value)]
    return shlex.join(["freerun", "train", *words, *added])


def _is_usual(best: Forecast, name: str) -> bool:
    """True if the mode has this value anyway, so that it need not be typed."""
    usual = {field.name: field.default for field in dataclasses.fields(find_mode(best.mode).traits.options)}
    return name in usual and usual[name] == best.settings[name]


def by_workers(probe: Probe) -> list[Forecast]:
    """The best candidate for each mode and number of workers."""
    places: dict[tuple[str, int], list[Forecast]] = {}
    for found in probe.forecasts:
        places.setdefault((found.mode, found.num_workers), []).append(found)
    best = probe.best
    return [best if best in group else enough_of(group) for group in places.values()]


def findings(probe: Probe) -> list[str]:
    """What is worth knowing, one sentence each."""
    measured = probe.measured
    if isinstance(measured, TensorMeasurement):
        return _tensor_findings(probe, measured)
    env = measured.environment
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
    if env.bytes_per_step >= LARGE_STEP_BYTES:
        found.append(
            f"A step takes {env.bytes_per_step / 1e3:.0f} kB of shared memory on its way to the learner. Segments of "
            f"{USUAL_SEGMENT} steps take {SLOTS_PER_WORKER * USUAL_SEGMENT * env.bytes_per_step / 1e6:.0f} MB for each "
            f"worker, beside its own {env.megabytes:.0f} MB."
        )
    if measured.inference_seconds > max(SLOW_ACTION_SECONDS, steps["mean"]):
        found.append(
            f"The network is slower than the environment: an action takes {shown(measured.inference_seconds)}. Try a "
            "smaller --network, or with a GPU --mode sync --act-on-device, which chooses all actions in one batch."
        )
    if env.threads_speed_up is not None:
        says = "leaves" if env.threads_speed_up >= THREADS_PAY_OFF else "mostly holds"
        found.append(f"It {says} Python's lock while it steps: two threads step {env.threads_speed_up:.1f} × as fast.")
    found.append(_about_overlap(probe, measured))
    return found


def _tensor_findings(probe: Probe, measured: TensorMeasurement) -> list[str]:
    """The same for environments that are tensors."""
    best, update = probe.best, update_cost(measured.updates, probe.best_config)
    collect = update.steps * measured.seconds_per_step(best.num_envs, best.segment_steps or 1)
    found = [
        f"A step of {vector.num_envs:,} environments, with the policy, takes "
        f"{shown(vector.seconds_per_step * vector.num_envs)} in segments of {vector.segment_steps} steps: "
        f"{1 / vector.seconds_per_step:,.0f} steps/s."
        for vector in measured.vectors
    ]
    found.append(
        f"An update learns from {update.steps:,} steps in {shown(update.seconds)}; collecting them takes "
        f"{shown(collect)}. Doing both at once is worth × {overlap_ceiling(collect, update.seconds):.2f} at most."
    )
    found.append(
        f"While both go on, collecting has {100 * measured.collect_share:.0f} % of its speed, and learning "
        f"{100 * measured.learn_share:.0f} %."
    )
    if measured.mean_length is not None:
        found.append(f"Episodes of an untrained policy take {measured.mean_length:,.0f} steps on average.")
    if measured.is_bounded:
        found.append(
            f"More environments would leave the run fewer than {FEWEST_UPDATES} updates: give a larger --total-steps."
        )
    return found


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


def _about_overlap(probe: Probe, measured: Measurement) -> str:
    update = update_cost(measured.updates, probe.best_config)
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
    measured, best = probe.measured, probe.best
    about = _tensor_figures(measured) if isinstance(measured, TensorMeasurement) else _figures(measured)
    return json.dumps(
        {
            "env": callable_name(config.env),
            "algo": config.algo,
            "device": config.device,
            **about,
            "updates": [dataclasses.asdict(update) for update in measured.updates],
            "findings": findings(probe),
            "candidates": [
                {"mode": found.mode, "settings": found.settings, "steps_per_second": found.steps_per_second}
                for found in probe.forecasts
            ],
            "predictions": [dataclasses.asdict(found) for found in by_workers(probe)],
            "refused": probe.refused,
            "recommendation": {
                "mode": best.mode,
                "num_workers": best.num_workers,
                "settings": best.settings,
                "steps_per_second": best.steps_per_second,
                "runner_up": None if probe.runner_up is None else dataclasses.asdict(probe.runner_up),
                "why": why(best, measured),
                "command": command(best, words),
            },
            "probe_seconds": measured.took_seconds,
        },
        indent=1,
    )


def _figures(measured: Measurement) -> dict[str, Any]:
    env = measured.environment
    return {
        "environment": {
            "construct_seconds": env.construct_seconds,
            "reset_seconds": statistics(env.reset_seconds),
            "step_seconds": statistics(env.step_seconds),
            "cpu_share": env.cpu_share,
            "stolen_share": env.stolen_share,
            "mean_episode_steps": env.mean_length,
            "worker_megabytes": env.megabytes,
            "megabytes_per_env": env.megabytes_per_env,
            "loop_seconds": env.loop_seconds,
            "threads_speed_up": env.threads_speed_up,
            "seconds_per_step_by_envs": {size: pair[0] for size, pair in env.vectors.items()},
        },
        "inference_seconds": {"alone": measured.inference_seconds, "of_64": measured.batched_inference_seconds},
        "machine": {"cores": measured.cores, "parallel_cores": measured.parallel_cores},
        "overheads": {mode: [dataclasses.asdict(cost) for cost in costs] for mode, costs in measured.overheads.items()},
    }


def _tensor_figures(measured: TensorMeasurement) -> dict[str, Any]:
    return {
        "environment": {
            "construct_seconds": measured.construct_seconds,
            "mean_episode_steps": measured.mean_length,
            "vectors": [dataclasses.asdict(vector) for vector in measured.vectors],
        },
        "both_at_once": {"collect_share": measured.collect_share, "learn_share": measured.learn_share},
    }


def print_report(
    probe: Probe, config: Config, console: Console, words: Sequence[str], counts: Sequence[int] = ()
) -> None:
    """Print all of it. With `counts`, a second table compares these numbers of workers."""
    measured = probe.measured
    console.print(f"[bold]{callable_name(config.env)}[/bold], {config.algo} on {config.device}", highlight=False)
    if isinstance(measured, Measurement):
        env = measured.environment
        console.print(_times(env))
        console.print(
            f"Construct {shown(env.construct_seconds)}, {env.megabytes:.0f} MB per worker; inference "
            f"{shown(measured.inference_seconds)} alone, {shown(measured.batched_inference_seconds)} per environment "
            "in a batch of 64.",
            highlight=False,
        )
    for text in findings(probe):
        console.print(f"· {text}", highlight=False, markup=False)
    console.print(_predictions(probe))
    if counts:
        console.print(_predictions_by_workers(probe))
    for text in _notes(probe):
        console.print(text, style="dim", highlight=False, markup=False)
    for mode, reason in probe.refused.items():
        console.print(f"{mode} is left out: {reason}", highlight=False, markup=False)
    label, style = ("Best guess: ", "yellow") if measured.is_unsure else ("Recommended: ", "bold green")
    console.print(sentence(probe).replace("auto: ", label, 1) + ".", style=style, highlight=False)
    console.print(command(probe.best, words), highlight=False, markup=False, soft_wrap=True)
    kept = "not kept, for the machine is busy" if measured.is_unsure else "kept for --mode auto"
    console.print(f"(probed in {measured.took_seconds:.0f} s; {kept})", style="dim", highlight=False)


def _times(env: Environment) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("mean", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for name, values in (("step", env.step_seconds), ("reset", env.reset_seconds)):
        table.add_row(name, *(shown(value) for value in statistics(values).values()))
    return table


def _modes(probe: Probe) -> list[str]:
    """All modes in the order of the registry; modes of the user's own come last."""
    found_modes = dict.fromkeys(found.mode for found in probe.forecasts)
    return sorted(found_modes, key=lambda mode: [*MODES, *found_modes].index(mode))


def _predictions(probe: Probe) -> Table:
    """A row per mode, with its best setting; the recommended one stands out."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title="predicted steps/s of each mode at its best, and how busy the learner is",
        title_justify="left",
    )
    table.add_column("mode")
    for name in ("steps/s", "workers", "envs each", "hands over", "update", "episodes/s", "learner"):
        table.add_column(name, justify="right")
    recommended = probe.best
    for mode in _modes(probe):
        found = recommended if recommended.mode == mode else probe.of(mode)
        if found is None:
            table.add_row(mode, "–")
            continue
        cells = (
            f"{found.speed:,.0f}",
            str(found.num_workers),
            str(found.num_envs // found.num_workers),
            "episodes" if found.segment_steps is None else f"{found.segment_steps} steps",
            "–" if found.update_steps is None else f"{found.update_steps:,} steps",
            f"{found.episodes_per_second:,.1f}" if found.episodes_per_second else "–",
            f"{100 * (found.learner_busy or 0.0):.0f} %",
        )
        table.add_row(mode, *cells, style="bold green" if found is recommended else "")
    return table


def _predictions_by_workers(probe: Probe) -> Table:
    """A row per mode, a column per number of workers; each cell is the best candidate there."""
    best, cells_by_place = probe.best, {(found.mode, found.num_workers): found for found in by_workers(probe)}
    counts = sorted({found.num_workers for found in probe.forecasts})
    table = Table(box=box.SIMPLE_HEAD, title="predicted steps/s by number of workers", title_justify="left")
    table.add_column("mode")
    for count in counts:
        table.add_column(str(count), justify="right")
    for mode in _modes(probe):
        cells = []
        for count in counts:
            found = cells_by_place.get((mode, count))
            text = "" if found is None else f"{found.speed:,.0f}" if found.speed else "–"
            cells.append(f"[bold green]{text}[/]" if found is best else text)
        table.add_row(mode, *cells)
    return table


def _notes(probe: Probe) -> list[str]:
    """Why modes have no prediction, or are not chosen."""
    notes = {f"{found.mode} {found.note}" for found in probe.forecasts if found.note}
    reasons = {mode: find_mode(mode).traits.why_not_auto for mode in _modes(probe)}
    asked = [f"{mode} is chosen only if asked for: {reason}" for mode, reason in reasons.items() if reason]
    return [*sorted(notes), *asked]
