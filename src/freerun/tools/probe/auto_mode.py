"""`--mode auto` and `--num-workers auto`: predicts every candidate from a probe, picks one and says why in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freerun.collecting.scheduling.segment_rounds import refuse_episodes
from freerun.core import Demand, UserError
from freerun.settings.config import TrainConfig
from freerun.settings.defaults import check_adapting, complete
from freerun.settings.factories import episodes_per_update, is_tensors
from freerun.settings.registry import MODES, find_mode, mode_name, reference_mode
from freerun.tools.probe import probe_cache
from freerun.tools.probe.candidates import WAITS_BELOW, Search, with_settings
from freerun.tools.probe.forecast import Forecast, forecast
from freerun.tools.probe.measure import Config, measure
from freerun.tools.probe.measurement import AnyMeasurement, TensorMeasurement
from freerun.tools.probe.tensor_forecast import check_predictable, forecast_tensors

AUTO = "auto"
ABOUT_AS_FAST = 0.03
"""Two modes count as equally fast if their predictions differ by less than this share."""
ENOUGH_WORKERS = 0.03
"""More environments at the same time, or episodes cut into segments, are not worth it if they add less than this
share."""


@dataclass(frozen=True)
class Probe:
    """What was measured, and what is predicted from it."""

    measured: AnyMeasurement
    forecasts: list[Forecast]
    refused: dict[str, str]
    """Modes that cannot be used with these settings, and why."""
    configs: Mapping[str, Config]
    """The settings of the other modes, as they were given."""
    is_cached: bool = False

    @property
    def best(self) -> Forecast:
        return pick(self.forecasts)

    @property
    def best_config(self) -> Config:
        """The completed settings of what is predicted to be the best."""
        return complete(with_settings(self.configs[self.best.mode], self.best.settings))

    def of(self, mode: str) -> Forecast | None:
        """The best prediction for a mode, over all of its candidates; None if it could not train."""
        able = [found for found in self.forecasts if found.mode == mode and found.steps_per_second]
        return enough_of(able) if able else None

    @property
    def runner_up(self) -> Forecast | None:
        """The best prediction of the next best mode that `auto` may pick."""
        modes = dict.fromkeys(found.mode for found in self.forecasts if found.mode != self.best.mode)
        others = [best for mode in modes if (best := self.of(mode)) is not None and _may_pick(best)]
        return max(others, key=lambda found: found.speed, default=None)


def is_open(options: Mapping[str, Any]) -> bool:
    """Return whether freerun is to choose the mode or the number of workers."""
    return AUTO in (options.get("mode"), options.get("num_workers"))


def refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise UserError where `auto` is asked for and cannot be used."""
    if is_open(options):
        raise UserError(f"auto cannot be used here: {why}")


def in_mode(options: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The same settings in this mode, with the number of workers left open if it was."""
    found = {**options, "mode": mode}
    if found.get("num_workers") == AUTO:
        del found["num_workers"]
    return found


def candidates() -> list[str]:
    """The modes that `auto` chooses from. The default comes first, because --help shows the settings of the first."""
    return [TrainConfig.mode, *(mode for mode in MODES if mode != TrainConfig.mode)]


def settle(
    options: Mapping[str, Any], config_in: Callable[[str], Config], given: Collection[str], quiet: bool = False
) -> Config:
    """The config to run, with the mode and the settings for which the probe predicts the highest speed.

    The settings that are `given`, by name, stay as they are."""
    mode = mode_name(options)
    modes = candidates() if mode == AUTO else [mode]
    given = {name for name in given if options.get(name) != AUTO}
    probe, configs = look(
        modes, config_in, fresh=False, say=lambda doing: None, given=given, workers_alone=mode != AUTO
    )
    best = probe.best
    if not (quiet or configs[best.mode].quiet):
        print(sentence(probe), file=sys.stderr, flush=True)
    return with_settings(configs[best.mode], best.settings)


def look(
    modes: Sequence[str],
    config_in: Callable[[str], Config],
    fresh: bool,
    say: Callable[[str], None],
    counts: Sequence[int] = (),
    given: Collection[str] = (),
    workers_alone: bool = False,
) -> tuple[Probe, dict[str, Config]]:
    """Predictions for these modes, and the configs of those that can be used, as they were given."""
    configs: dict[str, Config] = {}
    refused: dict[str, str] = {}
    for mode in modes:
        try:
            config = config_in(mode)
            check_mode(mode, config)
            complete(config)
        except UserError as error:
            refused[mode] = str(error)
        else:
            configs[mode] = config
    if tensors := [mode for mode, config in configs.items() if is_tensors(config)]:
        others = {mode: config for mode, config in configs.items() if mode not in tensors}
        for mode in others:
            refused[mode] = f"it steps each environment by itself, and {tensors[0]} steps all of them as tensors"
            del configs[mode]
    if not configs:
        # One reason for all modes, such as a wrong environment, need not be told for each of them.
        if len(set(refused.values())) == 1:
            raise UserError(next(iter(refused.values())))
        reasons = "; ".join(f"{mode}: {reason}" for mode, reason in refused.items())
        raise UserError(f"no mode can be used with these settings: {reasons}")
    search = Search(configs, frozenset(given), workers_alone, tuple(counts))
    measured = None if fresh else probe_cache.find(search)
    is_cached = measured is not None
    if measured is None:
        measured = _measure(search, say)
        # A figure from a busy machine must not decide later runs.
        if not measured.is_unsure:
            probe_cache.keep(search, measured)
    forecasts = (
        forecast_tensors(measured, search) if isinstance(measured, TensorMeasurement) else forecast(measured, search)
    )
    return Probe(measured, forecasts, refused, configs, is_cached), configs


def _measure(search: Search, say: Callable[[str], None]) -> AnyMeasurement:
    if not search.is_tensors:
        return measure(search, say)
    from freerun.tools.probe.tensor_trial import measure_tensors  # it imports torch, which `freerun list` does without

    return measure_tensors(search, say)


def check_mode(mode: str, config: Config) -> None:
    """Raise UserError if the mode would refuse these settings when it starts, or if a probe cannot predict it."""
    traits = find_mode(mode).traits
    if traits.probe is None:
        raise UserError(f"a probe cannot predict --mode {mode}, which declares no model: give --num-workers a number")
    demand = Demand(episodes=episodes_per_update(config) or 0)
    if is_tensors(config):
        check_predictable(mode)
        refuse_episodes(demand, mode)
        if config.deterministic:
            raise UserError("--deterministic compares whole episodes, and environments that are tensors are cut")
        if config.max_episode_steps is not None:
            raise UserError("--max-episode-steps is not for environments that are tensors")
    if config.num_learners > 1:
        raise UserError("a probe knows one learner: leave --num-learners out, or name a mode")
    if config.deterministic and (not traits.deterministic or config.collector.segment_steps):
        raise UserError("--deterministic compares whole episodes, which it cuts into pieces")
    if config.max_lag and traits.takes_turns:
        raise UserError("it collects and learns in turns, so --max-lag must be 0")
    if config.max_lag is not None and traits.never_waits:
        raise UserError("it never waits, so it cannot keep to a --max-lag")
    if config.num_workers is not None:
        if traits.workers_flag not in (None, "--num-workers"):
            raise UserError(f"it has {traits.workers_flag}, not --num-workers")
        if traits.workers_flag is None and config.num_workers > 1:
            raise UserError("it has one worker")
    check_adapting(config)
    of_tensors = () if traits.tensors is None else traits.tensors.own_settings
    if not is_tensors(config) and any(getattr(config.collector, name) is not None for name in of_tensors):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in of_tensors)
        raise UserError(f"its {flags} are for environments that are tensors")
    if traits.package is not None and not traits.package.is_installed:
        raise UserError(f"{traits.package.name} is not installed: {traits.package.advice}")
    config.collector.check(demand)


# ---------------------------------------------------------------------------------------------- the choice


def _may_pick(found: Forecast) -> bool:
    """Modes that drop steps, for example, are chosen only where nothing else is left."""
    return find_mode(found.mode).traits.why_not_auto is None


def pick(forecasts: Sequence[Forecast]) -> Forecast:
    """The fastest; among those about as fast, the preferred mode, and then what asks for least."""
    able = [found for found in forecasts if found.steps_per_second]
    able = list(filter(_may_pick, able)) or able
    if not able:
        raise UserError(
            "no episode has ended, and every mode that is left waits for whole ones: give --max-episode-steps"
        )
    best = max(found.speed for found in able)
    close = {found.mode for found in able if found.speed >= (1 - ABOUT_AS_FAST) * best}
    mode = min(close, key=lambda name: find_mode(name).traits.preference)
    return enough_of([found for found in able if found.mode == mode])


def enough_of(forecasts: Sequence[Forecast]) -> Forecast:
    """Of the candidates of one mode that are about as fast as the fastest: the one with the fewest environments.

    Fewer environments mean younger data and, where updates grow with them, smaller updates. With as many of them, whole
    episodes come before segments."""
    most = max(found.speed for found in forecasts)
    enough = [found for found in forecasts if found.speed >= (1 - ENOUGH_WORKERS) * most]
    return min(enough, key=lambda found: (found.num_envs, found.segment_steps is not None, found.num_workers))


# ---------------------------------------------------------------------------------------------- in words


def sentence(probe: Probe) -> str:
    """What was chosen, what comes next, and why."""
    best = probe.best
    text = f"auto: {best.mode} with {how(best)}, {best.speed:,.0f} steps/s predicted"
    compared = []
    reference = reference_mode()
    one = probe.of(reference)
    if one is not None and one.steps_per_second and best.mode != reference:
        compared.append(f"{best.speed / one.speed:.1f} × {reference}")
    if (second := probe.runner_up) is not None:
        compared.append(f"next {second.mode} with {how(second)}, {second.speed:,.0f}")
    text += f" ({'; '.join(compared)})" if compared else ""
    text += f": {why(best, probe.measured)}"
    return text + (" (from an earlier probe)" if probe.is_cached else "")


def how(found: Forecast) -> str:
    """Say in a few words how a candidate collects."""
    text = "1 worker" if found.num_workers == 1 else f"{found.num_workers} workers"
    envs_each = found.num_envs // found.num_workers
    if envs_each > 1:
        text += f" × {envs_each} environments"
    return text if found.segment_steps is None else f"{text} in segments of {found.segment_steps} steps"


def why(best: Forecast, measured: AnyMeasurement) -> str:
    """Say what limits the speed."""
    if measured.is_unsure:
        return "a guess, for the machine is too busy to tell; probe again when it is quiet"
    if (best.learner_busy or 0.0) > 0.9:
        return "the learner is busy all the time, and more workers would not help"
    if isinstance(measured, TensorMeasurement):
        return "the simulator and the policy are the limit"
    cpu_share = measured.environment.cpu_share
    if cpu_share < WAITS_BELOW:
        return f"steps wait {100 * (1 - cpu_share):.0f} % of their time, so workers may outnumber cores"
    return "steps compute all their time, so the cores are the limit"
