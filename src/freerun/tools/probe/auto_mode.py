"""`--mode auto` and `--num-workers auto`: predicts every mode from a probe, picks one and says why in one line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freerun.adapters.tensor_envs import find_builder
from freerun.core import Demand, UserError
from freerun.settings.config import TrainConfig
from freerun.settings.defaults import check_adapting, complete
from freerun.settings.factories import episodes_per_update
from freerun.settings.registry import MODES, find_mode, mode_name, reference_mode
from freerun.tools.probe import probe_cache
from freerun.tools.probe.forecast import WAITS_BELOW, Forecast, forecast
from freerun.tools.probe.measure import Config, measure
from freerun.tools.probe.measurement import Environment, Measurement

AUTO = "auto"
ABOUT_AS_FAST = 0.03
"""Two modes count as equally fast if their predictions differ by less than this share."""
ENOUGH_WORKERS = 0.02
"""More workers are not worth it if they add less than this share."""


@dataclass(frozen=True)
class Probe:
    """What was measured, and what is predicted from it."""

    measured: Measurement
    forecasts: list[Forecast]
    refused: dict[str, str]
    """Modes that cannot be used with these settings, and why."""
    is_cached: bool = False

    @property
    def best(self) -> Forecast:
        return pick(self.forecasts)

    def of(self, mode: str) -> Forecast | None:
        """The best prediction for a mode, over all numbers of workers."""
        able = [found for found in self.forecasts if found.mode == mode and found.steps_per_second]
        return max(able, key=_speed, default=None)


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


def settle(options: Mapping[str, Any], config_in: Callable[[str], Config], quiet: bool = False) -> Config:
    """The config to run: with the mode and the number of workers for which the probe predicts the highest speed."""
    mode = mode_name(options)
    modes = candidates() if mode == AUTO else [mode]
    probe, configs = look(modes, config_in, fresh=False, say=lambda doing: None)
    best = probe.best
    if not (quiet or configs[best.mode].quiet):
        print(sentence(probe), file=sys.stderr, flush=True)
    return with_workers(configs[best.mode], best.num_workers)


def look(
    modes: Sequence[str],
    config_in: Callable[[str], Config],
    fresh: bool,
    say: Callable[[str], None],
    counts: Sequence[int] = (),
) -> tuple[Probe, dict[str, Config]]:
    """Predictions for these modes, and the configs of those that can be used, as they were given."""
    configs: dict[str, Config] = {}
    refused: dict[str, str] = {}
    for mode in modes:
        try:
            config = config_in(mode)
            check_mode(mode, config)
        except UserError as error:
            refused[mode] = str(error)
        else:
            configs[mode] = config
    if not configs:
        # One reason for all modes, such as a wrong environment, need not be told for each of them.
        if len(set(refused.values())) == 1:
            raise UserError(next(iter(refused.values())))
        reasons = "; ".join(f"{mode}: {reason}" for mode, reason in refused.items())
        raise UserError(f"no mode can be used with these settings: {reasons}")
    # Defaults are filled in for the measurement only: what is left open here may depend on the choice.
    whole = {mode: complete(config) for mode, config in configs.items()}
    measured = None if fresh else probe_cache.find(whole)
    is_cached = measured is not None
    if measured is None:
        measured = measure(whole, say)
        # A figure from a busy machine must not decide later runs.
        if not measured.environment.is_unsure:
            probe_cache.keep(whole, measured)
    given = next(iter(configs.values())).num_workers
    counts = [given] if given is not None else counts
    return Probe(measured, forecast(measured, whole, counts), refused, is_cached), configs


def check_mode(mode: str, config: Config) -> None:
    """Raise UserError if the mode would refuse these settings when it starts, or if a probe cannot predict it."""
    traits = find_mode(mode).traits
    if traits.probe is None:
        raise UserError(f"a probe cannot predict --mode {mode}, which declares no model: give --num-workers a number")
    if find_builder(config.env) is not None:
        raise UserError(
            f"{config.env} is stepped as tensors, which is not probed: leave auto out, and train chooses batch"
        )
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
    if any(getattr(config.collector, name) is not None for name in of_tensors):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in of_tensors)
        raise UserError(f"its {flags} are for environments that are tensors")
    if traits.package is not None and not traits.package.is_installed:
        raise UserError(f"{traits.package.name} is not installed: {traits.package.advice}")
    config.collector.check(Demand(episodes=episodes_per_update(config) or 0))


def with_workers(config: Config, num_workers: int) -> Config:
    """Return the config with this number of workers, in whichever setting the mode has for it."""
    flag = find_mode(config.mode).traits.workers_flag
    if flag in (None, "--num-workers"):
        return dataclasses.replace(config, num_workers=num_workers)
    setting = flag.removeprefix("--").replace("-", "_")
    return dataclasses.replace(config, collector=dataclasses.replace(config.collector, **{setting: num_workers}))


# ---------------------------------------------------------------------------------------------- the choice


def _speed(found: Forecast) -> float:
    return found.steps_per_second or 0.0


def pick(forecasts: Sequence[Forecast]) -> Forecast:
    """The fastest; among those about as fast, the preferred mode, and then the fewest workers."""
    able = [found for found in forecasts if found.steps_per_second]
    # Modes that drop steps, for example, are chosen only where nothing else is left.
    able = [found for found in able if find_mode(found.mode).traits.why_not_auto is None] or able
    if not able:
        raise UserError(
            "no episode has ended, and every mode that is left waits for whole ones: give --max-episode-steps"
        )
    best = max(map(_speed, able))
    close = {found.mode for found in able if _speed(found) >= (1 - ABOUT_AS_FAST) * best}
    mode = min(close, key=lambda name: find_mode(name).traits.preference)
    most = max(_speed(found) for found in able if found.mode == mode)
    enough = [found for found in able if found.mode == mode and _speed(found) >= (1 - ENOUGH_WORKERS) * most]
    return min(enough, key=lambda found: found.num_workers)


def sentence(probe: Probe) -> str:
    """What was chosen, and why."""
    best, env = probe.best, probe.measured.environment
    workers = "1 worker" if best.num_workers == 1 else f"{best.num_workers} workers"
    text = f"auto: {best.mode} with {workers}, {best.steps_per_second:,.0f} steps/s predicted"
    reference = reference_mode()
    one = probe.of(reference)
    if one is not None and one.steps_per_second and best.mode != reference:
        text += f" ({_speed(best) / one.steps_per_second:.1f} × {reference})"
    text += f": {why(best, env)}"
    return text + (" (from an earlier probe)" if probe.is_cached else "")


def why(best: Forecast, env: Environment) -> str:
    """Say what limits the speed."""
    if env.is_unsure:
        return "a guess, for the machine is too busy to tell; probe again when it is quiet"
    if (best.learner_busy or 0.0) > 0.9:
        return "the learner is busy all the time, and more workers would not help"
    if env.cpu_share < WAITS_BELOW:
        return f"steps wait {100 * (1 - env.cpu_share):.0f} % of their time, so workers may outnumber cores"
    return "steps compute all their time, so the cores are the limit"
