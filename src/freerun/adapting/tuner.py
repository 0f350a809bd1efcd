"""The tuner: tries one move at a time, looks what came of it, keeps what helped and takes back what did not.

It knows neither clock nor processes: windows go in, turns of knobs come out. So every sequence can be worked out by
hand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from freerun.adapting.knobs import Knob, halfway
from freerun.adapting.observation import Observation, pool
from freerun.adapting.rules import QUEUE_BAND, Aim, Circumstances, Suggestion, off_band, suggestions

SURE = 2.0
"""A difference counts when it is this many standard errors wide …"""
LEAST_GAIN = 0.03
"""… and at least this large."""
MOST_LOSS = 0.02
"""What saves something may cost so much speed …"""
MOST_LOSS_OF_ALL = 0.05
"""… and all that was saved together so much of the best speed, which is forgotten at the rate:"""
FORGETTING = 0.02
MOST_WINDOWS = 3
"""After so many windows a verdict is due."""
REST_WINDOWS = 20
"""So long a move that was undone is not tried again; twice as long each time."""
MOST_REST_WINDOWS = 320
FINEST = 1.2
"""Moves by a smaller factor are not worth a trial."""


@dataclass(frozen=True)
class Effect:
    """What a move did, as far as was measured."""

    before: float
    """Steps per second."""
    after: float
    gain: float
    noise: float
    """A gain smaller than this says nothing."""

    def __str__(self) -> str:
        return f"{self.before:,.0f} → {self.after:,.0f} steps/s ({self.gain:+.0%}, noise ±{self.noise:.0%})"


@dataclass(frozen=True)
class Turn:
    """One event: a knob was turned to try something, what was tried is kept, or it is turned back."""

    kind: str
    """"try", "keep" or "undo"."""
    knob: str
    old: float
    new: float
    """Its value from now on."""
    reason: str
    effect: Effect | None = None


@dataclass
class Trial:
    """The move whose effect is being measured."""

    suggestion: Suggestion
    old: float
    base: Observation
    windows: list[Observation] = field(default_factory=list)


@dataclass
class Failure:
    """A move that did not help: not so far in this direction before the rest is over."""

    target: float
    until: int
    rest: int


class Tuner:
    def __init__(self, knobs: Sequence[Knob], given: Circumstances):
        self.knobs: Mapping[str, Knob] = {knob.name: knob for knob in knobs}
        self.trial: Trial | None = None
        self._given = given
        self._base: deque[Observation] = deque(maxlen=MOST_WINDOWS)
        self._failures: dict[tuple[str, bool], Failure] = {}
        self._best = 0.0
        self._now = 0

    def observe(self, seen: Observation) -> list[Turn]:
        """A window has passed in which nothing was turned; what to turn now, in this order."""
        self._now += 1
        if self.trial is None:
            self._base.append(seen)
            self._remember(pool(list(self._base)).steps_per_second)
            return self._try()
        self.trial.windows.append(seen)
        after = pool(self.trial.windows)
        effect = self._effect(self.trial.base, after)
        helped = self._verdict(self.trial, after, effect)
        if helped is None:
            return []
        return self._keep(after, effect) if helped else self._undo(self.trial.suggestion.reason, effect)

    def abandon(self, reason: str) -> list[Turn]:
        """What is being tried does harm, or never comes into force: turn it back without a measurement."""
        return [] if self.trial is None else self._undo(reason, None)

    # ------------------------------------------------------------------------------------------ trying

    def _try(self) -> list[Turn]:
        base = pool(list(self._base))
        for suggestion in suggestions(base, self.knobs, self._given):
            knob = self.knobs[suggestion.knob]
            target = self._permitted(knob, suggestion.target)
            if target is not None:
                self.trial = Trial(suggestion, knob.value, base)
                knob.value, old = target, knob.value
                return [Turn("try", knob.name, old, target, suggestion.reason)]
        return []

    def _permitted(self, knob: Knob, target: float) -> float | None:
        """As far as it may go: halfway to what has failed; None if that is hardly a move."""
        upwards = target > knob.value
        failure = self._failures.get((knob.name, upwards))
        if failure is not None and self._now < failure.until:
            beyond = target >= failure.target if upwards else target <= failure.target
            if beyond:
                target = knob.fit(halfway(knob.value, failure.target))
        factor = target / knob.value if upwards else knob.value / target
        is_at_bound = target in (knob.low, knob.high) and failure is None
        return target if factor >= FINEST or (is_at_bound and factor > 1) else None

    # ------------------------------------------------------------------------------------------ judging

    def _effect(self, base: Observation, after: Observation) -> Effect:
        before = max(base.steps_per_second, 1e-9)
        noise = SURE * math.hypot(base.noise, after.noise)
        gain = after.steps_per_second / before - 1
        return Effect(base.steps_per_second, after.steps_per_second, gain, max(LEAST_GAIN, noise))

    def _verdict(self, trial: Trial, after: Observation, effect: Effect) -> bool | None:
        """Whether it helped; None while that cannot be said yet."""
        is_due = len(trial.windows) >= MOST_WINDOWS
        if effect.gain < -effect.noise:
            return False
        if trial.suggestion.aim is Aim.SPEED:
            if effect.gain > effect.noise:
                return True
            return False if is_due else None
        if not self._is_nearer(trial, after):
            return False
        if effect.gain >= 0:
            return True
        if not is_due:
            return None
        return effect.gain > -MOST_LOSS and effect.after > (1 - MOST_LOSS_OF_ALL) * self._best

    def _is_nearer(self, trial: Trial, after: Observation) -> bool:
        """To what it was meant for, beside the speed."""
        base, aim = trial.base, trial.suggestion.aim
        if aim is Aim.LAG:
            return after.lag < base.lag or after.lag == 0
        if aim is Aim.QUEUE and base.queue_fill is not None and after.queue_fill is not None:
            return off_band(after.queue_fill, QUEUE_BAND) < off_band(base.queue_fill, QUEUE_BAND)
        return True

    def _keep(self, after: Observation, effect: Effect) -> list[Turn]:
        assert self.trial is not None
        trial, self.trial = self.trial, None
        knob = self.knobs[trial.suggestion.knob]
        # Not back again soon: whoever goes up and down gets nowhere.
        self._fail(knob, trial.old, upwards=trial.old > knob.value)
        self._base = deque([after], MOST_WINDOWS)
        self._remember(after.steps_per_second)
        kept = Turn("keep", knob.name, trial.old, knob.value, trial.suggestion.reason, effect)
        return [kept, *self._try()]

    def _undo(self, reason: str, effect: Effect | None) -> list[Turn]:
        assert self.trial is not None
        trial, self.trial = self.trial, None
        knob = self.knobs[trial.suggestion.knob]
        self._fail(knob, knob.value, upwards=knob.value > trial.old)
        knob.value, tried = trial.old, knob.value
        self._base.clear()
        return [Turn("undo", knob.name, tried, knob.value, reason, effect)]

    def _fail(self, knob: Knob, target: float, upwards: bool) -> None:
        before = self._failures.get((knob.name, upwards))
        again = before is not None and max(before.target, target) < FINEST * min(before.target, target)
        rest = min(MOST_REST_WINDOWS, 2 * before.rest) if before is not None and again else REST_WINDOWS
        self._failures[knob.name, upwards] = Failure(target, self._now + rest, rest)

    def _remember(self, rate: float) -> None:
        """The best speed of late; a run whose episodes grow longer may never see it again."""
        self._best = max(rate, self._best - FORGETTING * (self._best - rate))
