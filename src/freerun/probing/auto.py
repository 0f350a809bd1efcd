"""`--mode auto` and `--num-workers auto`: measured, predicted, chosen, and said in one line."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freerun.completing import check_adapting, complete
from freerun.config import TrainConfig
from freerun.core import Demand, UserError
from freerun.envs.tensors import find_builder
from freerun.probing import cache
from freerun.probing.forecast import WAITS_BELOW, Forecast, forecast
from freerun.probing.measure import Measurement, measure
from freerun.registry import ALIASES, MODES

AUTO = "auto"
ALL = [TrainConfig.mode, *(mode for mode in MODES if mode != TrainConfig.mode)]
"""The default first: --help shows its settings."""
PREFERENCE = ("freerun", "pipes", "executor", "batch", "sync", "sequential", "ray", "continuous")
"""Between modes that are about as fast: the one that does least around the environment."""
ONLY_IF_ASKED = {"ray": "it is for several machines", "continuous": "it drops steps and knows no limit to the lag"}
"""Modes that are never chosen while another will do."""
ABOUT_AS_FAST = 0.03
"""Predictions do not tell modes apart that are closer than this."""
ENOUGH_WORKERS = 0.02
"""Nor are more workers worth it that add less."""

Config = TrainConfig[Any, Any]


@dataclass(frozen=True)
class Probe:
    measured: Measurement
    forecasts: list[Forecast]
    refused: dict[str, str]
    """Modes that cannot be used with these settings, and why."""
    is_cached: bool = False

    @property
    def best(self) -> Forecast:
        return pick(self.forecasts)

    def of(self, mode: str) -> Forecast | None:
        """The best of a mode."""
        able = [found for found in self.forecasts if found.mode == mode and found.steps_per_second]
        return max(able, key=_speed, default=None)


def is_open(options: Mapping[str, Any]) -> bool:
    return AUTO in (options.get("mode"), options.get("num_workers"))


def refuse(options: Mapping[str, Any], why: str) -> None:
    if is_open(options):
        raise UserError(f"auto cannot be used here: {why}")


def in_mode(options: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The same settings in this mode, with the number of workers left open if it was."""
    found = {**options, "mode": mode}
    if found.get("num_workers") == AUTO:
        del found["num_workers"]
    return found


def settle(options: Mapping[str, Any], config_in: Callable[[str], Config], quiet: bool = False) -> Config:
    """The config to run: in the mode, and with the workers, that the probe predicts most of."""
    mode = options.get("mode", TrainConfig.mode)
    modes = ALL if mode == AUTO else [ALIASES.get(str(mode), str(mode))]
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
    """What each of these modes would do; and the configs of those that can be used, as they were given."""
    configs: dict[str, Config] = {}
    refused: dict[str, str] = {}
    for mode in modes:
        try:
            config = config_in(mode)
            _check(mode, config)
        except UserError as error:
            refused[mode] = str(error)
        else:
            configs[mode] = config
    if not configs:
        if len(set(refused.values())) == 1:
            raise UserError(next(iter(refused.values())))
        reasons = "; ".join(f"{mode}: {reason}" for mode, reason in refused.items())
        raise UserError(f"no mode can be used with these settings: {reasons}")
    whole = {mode: complete(config) for mode, config in configs.items()}
    measured = None if fresh else cache.find(whole)
    is_cached = measured is not None
    if measured is None:
        measured = measure(whole, say)
        cache.keep(whole, measured)
    given = next(iter(configs.values())).num_workers
    counts = [given] if given is not None else counts
    return Probe(measured, forecast(measured, whole, counts), refused, is_cached), configs


def _check(mode: str, config: Config) -> None:
    """Refuse what the mode would refuse when it starts: one sentence."""
    if mode not in MODES:
        raise UserError(f"a probe knows freerun's modes, not {mode}: give --num-workers a number")
    entry = MODES[mode]
    if find_builder(config.env) is not None:
        raise UserError(f"{config.env} is stepped as tensors, which is not probed: use --mode batch")
    if config.num_learners > 1:
        raise UserError("a probe knows one learner: leave --num-learners out, or name a mode")
    if config.deterministic and (not entry.whole_episodes or getattr(config.collector, "segment_steps", None)):
        raise UserError("--deterministic compares whole episodes, which it cuts into pieces")
    if config.max_lag and entry.takes_turns:
        raise UserError("it collects and learns in turns, so --max-lag must be 0")
    if config.max_lag is not None and entry.never_waits:
        raise UserError("it never waits, so it cannot keep to a --max-lag")
    if config.num_workers is not None:
        if mode == "continuous":
            raise UserError("it has --num-collectors, not --num-workers")
        if mode in ("sequential", "batch") and config.num_workers > 1:
            raise UserError("it has one worker")
    check_adapting(config)
    if mode == "sync" and (config.collector.num_envs or config.collector.num_steps_per_env):
        raise UserError("its --num-envs and --num-steps-per-env are for environments that are tensors")
    if mode == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed: pip install 'freerun[ray]'")
    config.collector.check(Demand(episodes=getattr(config.algorithm, "episodes_per_update", None) or 0))


def with_workers(config: Config, num_workers: int) -> Config:
    if config.mode == "continuous":
        collector = dataclasses.replace(config.collector, num_collectors=num_workers)
        return dataclasses.replace(config, collector=collector)
    return dataclasses.replace(config, num_workers=num_workers)


# ---------------------------------------------------------------------------------------------- the choice


def _speed(found: Forecast) -> float:
    return found.steps_per_second or 0.0


def pick(forecasts: Sequence[Forecast]) -> Forecast:
    """The fastest; among those about as fast, the preferred mode, and then the fewest workers."""
    able = [found for found in forecasts if found.steps_per_second]
    able = [found for found in able if found.mode not in ONLY_IF_ASKED] or able
    if not able:
        raise UserError(
            "no episode has ended, and every mode that is left waits for whole ones: give --max-episode-steps"
        )
    best = max(map(_speed, able))
    close = {found.mode for found in able if _speed(found) >= (1 - ABOUT_AS_FAST) * best}
    mode = min(close, key=PREFERENCE.index)
    most = max(_speed(found) for found in able if found.mode == mode)
    enough = [found for found in able if found.mode == mode and _speed(found) >= (1 - ENOUGH_WORKERS) * most]
    return min(enough, key=lambda found: found.num_workers)


def sentence(probe: Probe) -> str:
    """What was chosen, and why."""
    best, env = probe.best, probe.measured.environment
    workers = "1 worker" if best.num_workers == 1 else f"{best.num_workers} workers"
    text = f"auto: {best.mode} with {workers}, {best.steps_per_second:,.0f} steps/s predicted"
    one = probe.of("sequential")
    if one is not None and one.steps_per_second and best.mode != "sequential":
        text += f" ({_speed(best) / one.steps_per_second:.1f} × sequential)"
    text += f": {why(best, env.cpu_share)}"
    return text + (" (from an earlier probe)" if probe.is_cached else "")


def why(best: Forecast, cpu_share: float) -> str:
    if (best.learner_busy or 0.0) > 0.9:
        return "the learner is busy all the time, and more workers would not help"
    if cpu_share < WAITS_BELOW:
        return f"steps wait {100 * (1 - cpu_share):.0f} % of their time, so workers may outnumber cores"
    return "steps compute all their time, so the cores are the limit"
