"""Each environment here is broken in one way, and the check says which, and how to mend it."""

from __future__ import annotations

import io
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from rich.console import Console

from freerun.adapters import env_wrappers
from freerun.core import EnvFailure, UserError
from freerun.settings.registry import make_config
from freerun.tools.check_env import check_topics, recorded_episode
from freerun.tools.check_env.checks import Finding, check, print_report
from freerun.tools.check_env.remedies import Level
from freerun.tools.cli import main
from freerun.transport import processes

EnvClass = Callable[..., "gymnasium.Env[Any, Any]"]


class Walk(gymnasium.Env[Any, Any]):
    """Nothing wrong: a random walk that ends beyond ±2, or is truncated after 30 steps."""

    def __init__(self) -> None:
        self.observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space: Any = spaces.Discrete(2)

    def draw(self) -> float:
        return float(self.np_random.normal())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.position, self.num_steps = 0.1 * self.draw(), 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.position += 0.2 * self.draw() + 0.1 * (2 * int(action) - 1)
        self.num_steps += 1
        return self.observe(), -abs(self.position), abs(self.position) > 2, self.num_steps == 30, {}

    def observe(self) -> Any:
        return np.array([self.position, self.num_steps / 30], np.float32)


# ---------------------------------------------------------------------------------------------- spaces, values


class SequenceObs(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Sequence(spaces.Discrete(3))


class HugeActions(Walk):
    def __init__(self, high: float = 5000.0) -> None:
        super().__init__()
        self.action_space = spaces.Box(-high, high, (1,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(float(action[0]) > 0)


class UnboundedActions(HugeActions):
    def __init__(self) -> None:
        super().__init__(float("inf"))


class TightBounds(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-0.01, 0.01, (2,), np.float32)


class Doubles(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)


class DoublesInASpaceOfFloats(Walk):
    def observe(self) -> Any:
        return np.array([self.position, self.num_steps / 30])


class Pixels(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (4, 5, 3), np.uint8)

    def observe(self) -> Any:
        return np.full((4, 5, 3), 100 + 10 * self.position, np.uint8)


class PixelsAmongOthers(Pixels):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"camera": self.observation_space, "speed": spaces.Box(-9, 9, (1,))})

    def observe(self) -> Any:
        return {"camera": super().observe(), "speed": np.array([self.position], np.float32)}


class Films(Pixels):
    """Two pictures at a time, each with channels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (2, 4, 5, 3), np.uint8)

    def observe(self) -> Any:
        return np.stack([super().observe()] * 2)


class CountsTooFar(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(5)

    def observe(self) -> Any:
        return self.num_steps


class NaNObs(Walk):
    def observe(self) -> Any:
        return super().observe() * (np.float32("nan") if self.num_steps == 3 else 1)


class WrongShape(Walk):
    def observe(self) -> Any:
        return super().observe()[:, None]


class Result(Walk):
    """A step whose result is changed in one place."""

    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        raise NotImplementedError

    def step(self, action: Any) -> Any:
        return self.change(*super().step(action))


class InfiniteReward(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, -np.inf if self.num_steps == 2 else reward, terminated, truncated, info


class ArrayReward(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, np.array([reward]), terminated, truncated, info


class NoneFlag(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, reward, terminated, truncated or None, info


# ---------------------------------------------------------------------------------------------- interface, errors


class FourValues(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, reward, terminated or truncated, info


class ThreeValues(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, reward, terminated or truncated


class NoInfo(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, reward, terminated, truncated, None


class BareReset(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]


class OldReset(Walk):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class NoSpaces(Walk):
    def __init__(self) -> None:
        pass


class OneBuffer(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(2, np.float32)

    def observe(self) -> Any:
        self.buffer[:] = super().observe()
        return self.buffer


class Raises(Walk):
    def step(self, action: Any) -> Any:
        if self.num_steps == 5:
            raise ZeroDivisionError("the simulator fell over")
        return super().step(action)


class RaisesAtOnce(Walk):
    def __init__(self) -> None:
        raise RuntimeError("no display")


class RaisesInReset(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise FileNotFoundError("map.bin")


class RaisesInClose(Walk):
    def close(self) -> None:
        raise ConnectionError("already gone")


# ---------------------------------------------------------------------------------------------- seeding


class Unseeded(Walk):
    def draw(self) -> float:
        return float(np.random.default_rng().normal())


class GlobalNumpy(Walk):
    def draw(self) -> float:
        return float(np.random.normal())


class GlobalRandom(Walk):
    def draw(self) -> float:
        return random.gauss(0, 1)


class Forgetful(Walk):
    """Its reset leaves something behind."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def observe(self) -> Any:
        self.total += self.position
        return np.array([self.position, self.total], np.float32)


class Shared(Walk):
    """One position for all environments of a process."""

    positions: ClassVar[list[float]] = [0.0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed)
        self.positions[0] = self.position
        return obs, info

    def step(self, action: Any) -> Any:
        self.position = self.positions[0]
        result = super().step(action)
        self.positions[0] = self.position
        return result


class OneAtATime(Walk):
    """Refuses to step while another environment of its process plays, as a simulator with global state must."""

    playing: ClassVar[list[object]] = [None]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.playing[0] = self
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.playing[0] is not self:
            raise UserError("one simulation per process: give --envs-per-worker 1")
        return super().step(action)


class NoChance(Walk):
    def draw(self) -> float:
        return 0.5


# ---------------------------------------------------------------------------------------------- endings, autoreset


class NeverEnds(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, reward, False, False, info


class Slow(NeverEnds):
    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


class TerminatesOnTime(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return obs, reward, self.num_steps == 12, False, info


class ResetsItself(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        return self.reset()[0] if terminated or truncated else obs, reward, terminated, truncated, info


class LoopsInside(Walk):
    """Starts again from the same place at its end, without a call of reset that could be seen."""

    def step(self, action: Any) -> Any:
        self.num_steps = (self.num_steps + 1) % 8
        return self.observe(), 0.0, False, self.num_steps == 0, {}

    def observe(self) -> Any:
        return np.array([0.0, self.num_steps], np.float32)


class TellsFinal(Result):
    def change(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        info = {"final_observation": obs} if terminated or truncated else {}
        return obs, reward, terminated, truncated, info


class StartsOver(Walk):
    """Resets its simulator at the end, but returns the last observation: that is all right."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if result[2] or result[3]:
            self.reset()
        return result


# ---------------------------------------------------------------------------------------------- workers


class NotInWorkers(Walk):
    def __init__(self) -> None:
        super().__init__()
        if processes.is_worker():
            raise OSError("the licence server allows one process")


class DiesInWorkers(Walk):
    def step(self, action: Any) -> Any:
        if processes.is_worker():
            os._exit(7)
        return super().step(action)


class HangsInWorkers(Walk):
    def step(self, action: Any) -> Any:
        if processes.is_worker():
            time.sleep(60)
        return super().step(action)


class ElsewhereInWorkers(Walk):
    def observe(self) -> Any:
        return super().observe() + processes.is_worker()


def behind_a_lock() -> EnvClass:
    lock = threading.Lock()

    def build() -> Walk:
        with lock:
            return Walk()

    return build


# ---------------------------------------------------------------------------------------------- the tests


def findings_of(env: str | EnvClass, topic: str, num_episodes: int = 3) -> list[Finding]:
    return [finding for finding in check(env, {}, num_episodes) if finding.topic == topic]


@pytest.mark.parametrize(
    ("env", "topic", "level", "found", "advice"),
    [
        (SequenceObs, "spaces", "problem", "Sequence", "use a Box"),
        (HugeActions, "spaces", "warning", "5000", "Box(-1, 1)"),
        (UnboundedActions, "spaces", "warning", "no bounds", "Box(-1, 1)"),
        (TightBounds, "spaces", "warning", "outside", "widen the bounds"),
        (Films, "spaces", "warning", "images of shape (2, 4, 5, 3)", "docs/own_networks.md"),
        (Films, "spaces", "warning", "120 pixels flattened into one row and unscaled", "returns features"),
        (DoublesInASpaceOfFloats, "values", "warning", "is float64, but observation_space says float32", "astype"),
        (NaNObs, "values", "problem", "nan in the observation, after 3 steps of the episode", "division by zero"),
        (WrongShape, "values", "problem", "(2, 1), but observation_space says (2,), after 0 steps", "same shape"),
        (CountsTooFar, "values", "problem", "does not fit Discrete(5)", "declare what is returned"),
        (InfiniteReward, "values", "problem", "reward is -inf, after 2 steps", "float(reward)"),
        (ArrayReward, "values", "problem", "no number, but array([", "float(reward)"),
        (NoneFlag, "values", "problem", "truncated is no bool, but None", "bool(truncated)"),
        (FourValues, "interface", "problem", "four values", "terminated, truncated"),
        (ThreeValues, "interface", "problem", "not five values", "terminated, truncated"),
        (NoInfo, "interface", "problem", "info is no dict, but None", "dict"),
        (BareReset, "interface", "problem", "reset() returns ndarray", "return obs, info"),
        (OldReset, "errors", "problem", "keyword argument 'seed'", "seed=None, options=None"),
        (NoSpaces, "errors", "problem", "no attribute 'observation_space'", "self.action_space"),
        (Raises, "errors", "problem", "ZeroDivisionError: the simulator fell over", "env.reset(seed="),
        (RaisesInReset, "errors", "problem", "FileNotFoundError: map.bin", "env.reset(seed="),
        (RaisesInClose, "closing", "problem", "ConnectionError: already gone", "last line"),
        (Unseeded, "seeding", "problem", "same seed and actions give another episode", "self.np_random"),
        (GlobalNumpy, "seeding", "problem", "global generator", "self.np_random"),
        (GlobalRandom, "seeding", "problem", "global generator", "self.np_random"),
        (Forgetful, "seeding", "problem", "depends on those before it", "anew in reset()"),
        (Shared, "seeding", "problem", "disturb each other", "keep state in self"),
        (OneAtATime, "seeding", "warning", "refused: one simulation per process", "give each worker one"),
        (NoChance, "seeding", "warning", "another seed gives the same episode", "self.np_random"),
        (NeverEnds, "endings", "problem", "no episode ended within 10,000 steps", "--max-episode-steps"),
        (TerminatesOnTime, "endings", "warning", "exactly 12 steps", "truncated=True"),
        (ResetsItself, "autoreset", "problem", "step() calls reset()", "last observation of the episode"),
        (LoopsInside, "autoreset", "warning", "the first one of the next", "last observation of the episode"),
        (TellsFinal, "autoreset", "problem", "final_observation", "last observation of the episode"),
        (behind_a_lock(), "workers", "problem", "cannot pickle", "inside the environment's __init__"),
        (NotInWorkers, "workers", "problem", "licence server", "in a new process"),
        (DiesInWorkers, "workers", "problem", "died with exit code 7", "in a new process"),
        (ElsewhereInWorkers, "workers", "problem", "another first observation", "between processes"),
    ],
)  # fmt: skip
def test_a_fault_is_found_and_the_advice_names_the_remedy(
    env: EnvClass, topic: str, level: Level, found: str, advice: str
) -> None:
    (finding,) = findings_of(env, topic)
    assert (finding.level, finding.good) == (level, level == "warning")
    assert found in finding.found
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("env", "env_args"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {}),
        ("freerun/Straggler-v0", {"mean_seconds": 0.0005, "tail_seconds": 0.002}),
        (Walk, {}),
        (StartsOver, {}),
    ],
)
def test_a_good_environment_is_all_good(env: str | EnvClass, env_args: Mapping[str, Any]) -> None:
    findings = check(env, env_args)
    assert [finding for finding in findings if finding.level != "ok"] == []
    absent = ("masks", "together")  # it has no masks, and is no vector environment
    topics = [topic for topic in (*check_topics.TOPICS, *check_topics.STEP_TOPICS) if topic not in absent]
    assert [finding.topic for finding in findings] == topics


@pytest.mark.parametrize("env", [Pixels, PixelsAmongOthers])
def test_images_that_a_cnn_takes_need_no_remedy(env: EnvClass) -> None:
    (finding,) = findings_of(env, "spaces")
    assert finding.level == "ok"


def test_one_fault_does_not_hide_the_other_topics() -> None:
    """Also where every episode raises, the steps before it tell something."""
    levels = {finding.topic: finding.level for finding in check(Raises, {})}
    assert levels.pop("errors") == "problem"
    assert levels.keys() >= {"spaces", "values", "seeding", "workers", "step times"}
    assert set(levels.values()) == {"ok"}


def test_what_freerun_takes_care_of_is_only_noted() -> None:
    (spaces_finding,) = findings_of(Doubles, "spaces")
    assert spaces_finding.level == "ok"
    assert "float64, converted to Box(2,) float32" in spaces_finding.found
    (interface,) = findings_of(OneBuffer, "interface")
    assert interface.level == "ok"
    assert "which freerun copies" in interface.found


def test_an_environment_that_hangs_in_a_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_topics, "WORKER_SECONDS", 1.0)
    (finding,) = findings_of(HangsInWorkers, "workers")
    assert finding.level == "problem"
    assert "did not answer within 1 s" in finding.found


def test_time_is_bounded_and_an_end_out_of_reach_is_only_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_topics, "SECONDS_PER_EPISODE", 0.2)
    monkeypatch.setattr(recorded_episode, "REPLAY_SECONDS", 0.1)
    started = time.monotonic()
    findings = check(Slow, {}, num_episodes=2)
    assert time.monotonic() - started < 10.0
    levels = {finding.topic: finding.level for finding in findings}
    assert levels.pop("endings") == "warning"
    assert set(levels.values()) == {"ok"}


def test_uneven_step_times_speak_for_pipes() -> None:
    (finding,) = [
        finding
        for finding in check("freerun/Straggler-v0", {"mean_seconds": 0.002, "tail_seconds": 0.02})
        if finding.topic == "step times"
    ]
    assert "uneven: --segment-steps 25" in finding.advice
    assert "--mode freerun, the default; `freerun probe`" in finding.advice


@pytest.mark.parametrize("env", [Walk, "freerun/Straggler-v0"])
def test_the_flags_that_are_recommended_can_be_given(env: Any) -> None:
    """They are those of the default mode, as in the README, and no others."""
    env_args = {"mean_seconds": 0.002, "tail_seconds": 0.02} if isinstance(env, str) else {}
    (finding,) = [finding for finding in check(env, env_args) if finding.topic == "step times"]
    flags = finding.advice.partition(" (--mode")[0].partition("With --mode")[0]
    words = re.findall(r"--[a-z-]+ \d+", flags)
    assert words
    options = {word.split()[0][2:].replace("-", "_"): int(word.split()[1]) for word in words}
    assert make_config({"env": "CartPole-v1", **options}).mode == "freerun"


def test_global_generators_are_left_as_they_were() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.Random(5).random(), np.random.RandomState(5).random()
    check(GlobalNumpy, {}, num_episodes=1)
    assert (random.random(), np.random.random()) == expected


def test_an_environment_that_cannot_be_built_raises() -> None:
    with pytest.raises(UserError, match="there is no environment"):
        check("NoSuchThing-v0", {})
    with pytest.raises(EnvFailure, match="no display"):
        check(RaisesAtOnce, {})
    with pytest.raises(UserError, match="--episodes"):
        check(Walk, {}, num_episodes=0)


def test_an_environment_is_checked_inside_its_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper is one of this test's: that for Atari needs packages that may be missing."""

    def stack(build: env_wrappers.Build) -> gymnasium.Env[Any, Any]:
        return env_wrappers.FrameStack(build({}), 3)

    monkeypatch.setitem(env_wrappers.WRAPPERS, "stack", stack)
    plain, stacked = (
        next(finding.found for finding in check("MountainCar-v0", {}, 1, wrap) if finding.topic == "spaces")
        for wrap in (None, "stack")
    )
    assert plain != stacked, "the wrapper changes nothing that is reported"
    with pytest.raises(UserError, match="there is no --wrap none-such"):
        check("MountainCar-v0", {}, 1, "none-such")


def test_the_report_fits_eighty_columns() -> None:
    text = io.StringIO()
    print_report("toy:Raises", check(Raises, {}), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "toy:Raises"
    assert any(line.startswith("✘  errors") for line in lines)
    assert any("→ to see it again" in line for line in lines)
    assert lines[-1] == "1 to mend (✘), 0 to look at (!)."


def test_the_command_exits_with_0_when_good_and_1_when_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check-env", "CartPole-v1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "All good."
    assert main.main(["check-env", f"{__name__}:NeverEnds", "--episodes", "1"]) == 1
    assert "--max-episode-steps" in capsys.readouterr().out
    assert main.main(["check-env", f"{__name__}:NoChance"]) == 0, "a warning is good"


# ---------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize(
    ("env", "env_args", "source"),
    [
        ("toy_envs:Masked", {}, 'the key "action_mask" of its info'),
        ("toy_envs:Masked", {"kind": "multidiscrete", "masks": "observation"}, "of its observations"),
        ("toy_envs:MaskedByMethod", {}, "its method action_masks()"),
    ],
)
def test_masks_are_found_and_random_actions_keep_to_them(env: str, env_args: dict[str, Any], source: str) -> None:
    findings = {finding.topic: finding for finding in check(env, env_args)}
    assert source in findings["masks"].found
    assert "choices are allowed on average, at least" in findings["masks"].found
    assert all(finding.good for finding in findings.values())


def test_a_mask_that_allows_nothing_is_a_problem() -> None:
    findings = {finding.topic: finding for finding in check("toy_envs:Masked", {"all_false_at": 2})}
    assert "forbids every action after 2 steps of the episode with seed" in findings["errors"].found


class HiddenMask(Walk):
    """Its code does not name the key of the mask."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:-1], {"action" + "_" + "mask"[:]: np.ones(2)}


def test_a_mask_that_training_does_not_find_is_a_warning() -> None:
    finding = next(finding for finding in check(HiddenMask, {}) if finding.topic == "masks")
    assert (finding.level, finding.advice) == ("warning", "give the environment a method action_masks()")
