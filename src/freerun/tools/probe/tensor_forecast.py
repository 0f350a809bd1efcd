"""Predicts the speed of every mode where environments are tensors: in turns, or at the same time as the learner."""

from __future__ import annotations

from freerun.core import Predictor, UserError
from freerun.settings.registry import find_mode
from freerun.tools.probe.candidates import Candidate, Search
from freerun.tools.probe.forecast import Forecast
from freerun.tools.probe.measurement import TensorMeasurement
from freerun.tools.probe.predict import Rate
from freerun.tools.probe.update_costs import update_cost

OVERLAPPING = (Predictor.BATCHES, Predictor.DROPPING_QUEUE)
"""Models of modes that collect tensors while the learner updates."""


def forecast_tensors(measured: TensorMeasurement, search: Search) -> list[Forecast]:
    """Predict every candidate whose number of environments was measured."""
    sizes = sorted({vector.num_envs for vector in measured.vectors})
    return [_predict(measured, candidate) for size in sizes for candidate in search.tensor_candidates(size)]


def check_predictable(mode: str) -> None:
    """Raise UserError if there is no model for how the mode steps tensors."""
    model = find_mode(mode).traits.probe
    if model is None or model.predictor not in (Predictor.LOCKSTEP, *OVERLAPPING):
        raise UserError(f"a probe cannot predict how --mode {mode} steps environments that are tensors")


def _predict(measured: TensorMeasurement, candidate: Candidate) -> Forecast:
    config, model = candidate.config, find_mode(candidate.mode).traits.probe
    assert model is not None  # `check_predictable` has refused modes without one
    update = update_cost(measured.updates, config)
    segment_steps = config.collector.num_steps_per_env
    collect = measured.seconds_per_step(candidate.num_envs, segment_steps)
    learn = update.seconds_per_step
    if model.predictor not in OVERLAPPING or config.max_lag == 0:
        rate = Rate(1 / (collect + learn), learn / (collect + learn))
    else:
        never_waits = find_mode(candidate.mode).traits.never_waits
        rate = overlapped(collect, learn, measured.collect_share, measured.learn_share, never_waits)
    episodes = rate.steps_per_second / measured.mean_length if measured.mean_length else None
    return Forecast(
        candidate.mode,
        candidate.num_workers,
        rate.steps_per_second,
        episodes,
        rate.learner_busy,
        settings=candidate.settings,
        num_envs=candidate.num_envs,
        segment_steps=segment_steps,
        update_steps=update.demand["steps"] or None,
    )


def overlapped(
    collect: float, learn: float, collect_share: float, learn_share: float, never_waits: bool = False
) -> Rate:
    """The speed of a collector and a learner that work at the same time, from the seconds per step of each alone.

    While both work, each has a share of its speed. The slower one, say the collector, works all the time. The learner
    works for l / s_l of every P seconds, and the collector has the share s_c of its speed meanwhile, and all of it
    otherwise:  P = c + (l / s_l) · (1 − s_c).  With shares of 1, P is the larger of c and l; where both shares are ½,
    nothing is gained over turns. A collector that never waits leaves the learner its share at most.
    """
    if never_waits and collect / collect_share <= learn / learn_share:
        seconds = learn / learn_share
    else:
        seconds = max(
            collect + learn / learn_share * (1 - collect_share), learn + collect / collect_share * (1 - learn_share)
        )
    return Rate(1 / seconds, min(1.0, learn / learn_share / seconds))
