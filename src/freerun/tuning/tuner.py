"""The tuner: it tries one change at a time, measures the effect, keeps what helped and undoes the rest.

It knows neither a clock nor processes: observations of windows go in, changes come out. So every sequence can be worked
out by hand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from freerun.core import Tunable
from freerun.tuning.observation import Observation, pool
from freerun.tuning.rules import QUEUE_BAND, Aim, Circumstances, Suggestion, distance_to_band, suggestions

MIN_STANDARD_ERRORS = 2.0
"""A difference counts when it is this many standard errors wide …"""
MIN_GAIN = 0.03
"""… and at least this large."""
MAX_LOSS = 0.02
"""A change that saves something may cost this share of the speed …"""
MAX_TOTAL_LOSS = 0.05
"""… and all such changes together this share of the best speed."""
FORGETTING = 0.02
"""In each window the remembered best speed moves by this share towards the current one."""
MAX_WINDOWS = 3
"""After this many windows a verdict is due."""
REST_WINDOWS = 20
"""For this long a change that was undone is not tried again; twice as long each time."""
MAX_REST_WINDOWS = 320
MIN_FACTOR = 1.2
"""A change by a smaller factor is not worth a trial."""


@dataclass(frozen=True)
class Effect:
    """The measured effect of a change."""

    before: float
    """Steps per second."""
    after: float
    gain: float
    noise: float
    """A smaller gain says nothing."""

    def __str__(self) -> str:
        return f"{self.before:,.0f} → {self.after:,.0f} steps/s ({self.gain:+.0%}, noise ±{self.noise:.0%})"


@dataclass(frozen=True)
class Change:
    """A tunable gets another value for a trial, keeps it after the trial, or gets its old value back."""

    kind: str
    """"try", "keep" or "undo"."""
    name: str
    """The name of the tunable."""
    old: float
    new: float
    """Its value from now on."""
    reason: str
    effect: Effect | None = None


@dataclass
class TuningTrial:
    """The change whose effect is being measured."""

    suggestion: Suggestion
    old: float
    base: Observation
    windows: list[Observation] = field(default_factory=list)


@dataclass
class FailedChange:
    """A change that did not help. Until the rest is over, its target is not approached further than halfway."""

    target: float
    until: int
    """The number of the window in which the rest ends."""
    rest: int


class Tuner:
    """Decides from one window to the next what to change."""

    def __init__(self, tunables: Sequence[Tunable], circumstances: Circumstances):
        self.tunables: Mapping[str, Tunable] = {tunable.name: tunable for tunable in tunables}
        self.values = {tunable.name: tunable.read() for tunable in tunables}
        """The values that the tunables have, or will have once the last change is in force."""
        for name, tunable in self.tunables.items():
            value = self.values[name]
            if not 0 < tunable.low <= value <= tunable.high:
                raise ValueError(f"{name} is {value}, which does not lie between {tunable.low} and {tunable.high}")
        self.trial: TuningTrial | None = None
        self._circumstances = circumstances
        self._base: deque[Observation] = deque(maxlen=MAX_WINDOWS)
        self._failures: dict[tuple[str, bool], FailedChange] = {}  # by tunable and whether it was an increase
        self._best_rate = 0.0
        self._num_windows = 0

    def observe(self, seen: Observation) -> list[Change]:
        """Take in a window in which nothing was changed; return what to change now, in this order."""
        self._num_windows += 1
        if self.trial is None:
            self._base.append(seen)
            self._remember_rate(pool(list(self._base)).steps_per_second)
            return self._try()
        self.trial.windows.append(seen)
        after = pool(self.trial.windows)
        effect = self._effect(self.trial.base, after)
        helped = self._verdict(self.trial, after, effect)
        if helped is None:
            return []
        return self._keep(after, effect) if helped else self._undo(self.trial.suggestion.reason, effect)

    def abandon(self, reason: str) -> list[Change]:
        """Undo the change that is being tried, without a measurement: it does harm, or never comes into force."""
        return [] if self.trial is None else self._undo(reason, None)

    # ------------------------------------------------------------------------------------------ trying

    def _try(self) -> list[Change]:
        """Begin a trial of the most promising change for which bounds and earlier failures leave room."""
        base = pool(list(self._base))
        for suggestion in suggestions(base, self.values, self._circumstances):
            tunable, old = self.tunables[suggestion.name], self.values[suggestion.name]
            target = self._permitted(tunable, old, tunable.scaled(old, suggestion.factor))
            if target is not None:
                self.trial = TuningTrial(suggestion, old, base)
                self.values[tunable.name] = target
                return [Change("try", tunable.name, old, target, suggestion.reason)]
        return []

    def _permitted(self, tunable: Tunable, value: float, target: float) -> float | None:
        """The target, or halfway to one that has failed; None if that is hardly a change."""
        if target == value:
            return None
        is_increase = target > value
        failure = self._failures.get((tunable.name, is_increase))
        if failure is not None and self._num_windows < failure.until:
            is_beyond = target >= failure.target if is_increase else target <= failure.target
            if is_beyond:
                # The geometric mean: settings are changed by factors.
                target = tunable.fit(math.sqrt(value * failure.target))
        factor = target / value if is_increase else value / target
        is_at_bound = target in (tunable.low, tunable.high) and failure is None
        return target if factor >= MIN_FACTOR or (is_at_bound and factor > 1) else None

    # ------------------------------------------------------------------------------------------ judging

    def _effect(self, base: Observation, after: Observation) -> Effect:
        before = max(base.steps_per_second, 1e-9)  # a run that stood still must not divide by zero
        # Standard error of a difference: sqrt(a^2 + b^2)
        noise = MIN_STANDARD_ERRORS * math.hypot(base.noise, after.noise)
        gain = after.steps_per_second / before - 1
        return Effect(base.steps_per_second, after.steps_per_second, gain, max(MIN_GAIN, noise))

    def _verdict(self, trial: TuningTrial, after: Observation, effect: Effect) -> bool | None:
        """Whether the change helped; None while that is uncertain."""
        is_due = len(trial.windows) >= MAX_WINDOWS
        if effect.gain < -effect.noise:  # clearly slower: no aim is worth that
            return False
        if trial.suggestion.aim is Aim.SPEED:
            if effect.gain > effect.noise:
                return True
            return False if is_due else None
        if not self._is_nearer(trial, after):
            return False
        # A change that saves something need not make the run faster: a loss that is hardly one is accepted in the end.
        if effect.gain >= 0:
            return True
        if not is_due:
            return None
        return effect.gain > -MAX_LOSS and effect.after > (1 - MAX_TOTAL_LOSS) * self._best_rate

    def _is_nearer(self, trial: TuningTrial, after: Observation) -> bool:
        """Whether the change has come nearer to its aim, apart from the speed."""
        base, aim = trial.base, trial.suggestion.aim
        if aim is Aim.LAG:
            return after.lag < base.lag or after.lag == 0
        if aim is Aim.QUEUE and base.queue_fill is not None and after.queue_fill is not None:
            return distance_to_band(after.queue_fill, QUEUE_BAND) < distance_to_band(base.queue_fill, QUEUE_BAND)
        return True

    def _keep(self, after: Observation, effect: Effect) -> list[Change]:
        assert self.trial is not None
        trial, self.trial = self.trial, None
        name = trial.suggestion.name
        # The way back counts as failed too, so that the tuner does not go up and down.
        self._note_failure(name, trial.old, is_increase=trial.old > self.values[name])
        self._base = deque([after], MAX_WINDOWS)
        self._remember_rate(after.steps_per_second)
        kept = Change("keep", name, trial.old, self.values[name], trial.suggestion.reason, effect)
        return [kept, *self._try()]

    def _undo(self, reason: str, effect: Effect | None) -> list[Change]:
        assert self.trial is not None
        trial, self.trial = self.trial, None
        name = trial.suggestion.name
        tried = self.values[name]
        self._note_failure(name, tried, is_increase=tried > trial.old)
        self.values[name] = trial.old
        self._base.clear()
        return [Change("undo", name, tried, trial.old, reason, effect)]

    def _note_failure(self, name: str, target: float, is_increase: bool) -> None:
        before = self._failures.get((name, is_increase))
        is_same = before is not None and max(before.target, target) < MIN_FACTOR * min(before.target, target)
        rest = min(MAX_REST_WINDOWS, 2 * before.rest) if before is not None and is_same else REST_WINDOWS
        self._failures[name, is_increase] = FailedChange(target, self._num_windows + rest, rest)

    def _remember_rate(self, rate: float) -> None:
        """Remember the best speed of late; a run whose episodes grow longer may never reach an early one again."""
        self._best_rate = max(rate, self._best_rate - FORGETTING * (self._best_rate - rate))
