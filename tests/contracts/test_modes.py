"""What every mode must do; a new line in the registry is tested here by itself."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import pytest
from worker_processes import left_of, workers

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.core import (
    Collector,
    CollectorSettings,
    Demand,
    EnvFailure,
    ModeOptions,
    Segment,
    StartPoint,
    State,
    UserError,
    episode_seed,
    first_episode_of,
    training_of,
)
from freerun.settings import registry
from freerun.telemetry.ledger import Ledger
from freerun.telemetry.timeline import RecordedTimeline

WHOLE = [name for name, mode in registry.MODES.items() if mode.traits.whole_episodes]
CASES = [(mode, workers) for mode in WHOLE for workers in ((1,) if mode == "sequential" else (1, 2, 8))]
LAGGING = [name for name, mode in registry.MODES.items() if not mode.traits.takes_turns]
LAGGING_WHOLE = [mode for mode in LAGGING if mode in WHOLE]
SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "total_episodes": 60,
    "episodes_per_update": 20,
    "minibatch_size": 128,
    "num_epochs": 3,
    "seed": 5,
    "quiet": True,
    "deterministic": True,
    "normalize_obs": True,
}


WEIGHTS = MLPActor(ActorSpec(4, (8,), "tanh", (2,), 0, False), scalar_actions=True).weights


def workers_for(mode: str, num: int) -> int:
    return 1 if mode == "sequential" else num


def mode_options(mode: str, num_workers: int) -> Any:
    """The mode's own settings, with few environments where that is its to say."""
    kind = registry.MODES[mode].load_config()
    if registry.MODES[mode].traits.takes_turns:  # what sync has is for environments that are tensors
        return kind()
    few = {"num_collectors": num_workers, "num_envs": 2 * num_workers, "collector_kind": "process"}
    few |= {"collection_batch_size": 16, "num_steps_per_env": 8}
    return kind(**{field.name: few[field.name] for field in dataclasses.fields(kind) if field.name in few})


def some(mode: str, num: int) -> Demand:
    """Episodes, or steps where a mode hands over pieces of them."""
    return Demand(episodes=num) if mode in WHOLE else Demand(steps=num)


class HostCollector(Collector, Protocol):
    """One whose segments are arrays."""

    def collect(self, demand: Demand) -> list[Segment]: ...


@contextmanager
def collecting(
    mode: str, env: str, num_workers: int = 2, max_lag: int = 0, deterministic: bool = False, **env_args: Any
) -> Iterator[HostCollector]:
    factory = GymnasiumFactory(env, env_args)
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True, batch_invariant=deterministic)
    options = mode_options(mode, num_workers)
    num_workers = options.num_workers or workers_for(mode, num_workers)
    settings = CollectorSettings(
        num_workers,
        None if registry.MODES[mode].traits.never_waits else max_lag,
        seed=3,
        deterministic=deterministic,
        time_limit=factory.spec.max_episode_steps,
    )
    extra = [] if type(options) is ModeOptions else [options]
    collector: HostCollector = registry.MODES[mode].load()(factory, policy, settings, *extra)
    try:
        collector.publish(policy.weights, 0)
        yield collector
    finally:
        collector.close()


def assert_same(a: Segment, b: Segment) -> None:
    for name in ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs", "version", "episode"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> freerun.Result:
    return freerun.train(**SETTINGS, mode="sequential", run_dir=tmp_path_factory.mktemp("reference") / "run")


@pytest.mark.parametrize(("mode", "num_workers"), CASES)
def test_deterministic_runs_end_at_the_weights_of_sequential(
    mode: str, num_workers: int, reference: freerun.Result, run_dir: Path
) -> None:
    result = freerun.train(**SETTINGS, mode=mode, num_workers=num_workers, run_dir=run_dir)
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)
    for name in ("env_steps", "episodes", "updates", "mean_return", "ledger"):
        assert result.summary[name] == reference.summary[name], name


@pytest.mark.parametrize("mode", WHOLE)
def test_segments_are_whole_episodes_and_hold_no_foreign_row(mode: str) -> None:
    with collecting(mode, "toy_envs:Audit", num_workers=3) as collector:
        segments = collector.collect(Demand(episodes=13))
    assert [int(segment.episode[0, 0]) for segment in segments] == list(range(13))
    for segment in segments:
        steps = np.arange(segment.num_steps, dtype=np.float32)
        mark, length = segment.obs[0, 0, 0], segment.obs[0, 0, 2]
        assert segment.num_steps == round(float(length) * 100)
        np.testing.assert_allclose(segment.obs[:, 0, 1] * 100, steps, rtol=1e-5)
        np.testing.assert_allclose(segment.next_obs[:, 0, 1] * 100, steps + 1, rtol=1e-5)
        assert (segment.obs[..., 0] == mark).all()
        assert (segment.next_obs[..., 0] == mark).all()
        np.testing.assert_array_equal(segment.reward[:, 0], steps + 1)
        assert not segment.ended[:-1].any()
        assert segment.terminated[-1, 0] ^ segment.truncated[-1, 0]
        assert (segment.version == 0).all()
        assert (segment.episode == segment.episode[0]).all()


@pytest.mark.parametrize("mode", registry.MODES)
def test_workers_note_what_they_do(mode: str, run_dir: Path) -> None:
    options = dataclasses.asdict(mode_options(mode, 2))
    options |= {} if "num_collectors" in options or mode in ("sequential", "batch") else {"num_workers": 2}
    result = freerun.train("CartPole-v1", mode=mode, total_steps=2000, quiet=True, run_dir=run_dir, **options)
    recording = RecordedTimeline.of(run_dir)
    assert recording is not None
    num_workers = result.summary["num_workers"]
    assert recording.tracks == [*(f"worker {worker}" for worker in range(num_workers)), "learner"]
    blocks = np.concatenate([moment.blocks for moment in recording.records()])
    for track, name in enumerate(recording.tracks):
        start, *seconds = blocks[blocks[:, 0] == track][:, 1:].T
        assert seconds[State.BUSY].sum() > 0, name
        # From the first note of a worker on, which Ray's are late with, no time is missing and none is told twice.
        stop = start[-1] + sum(spent[-1] for spent in seconds)
        assert sum(spent.sum() for spent in seconds) == pytest.approx(stop - start[0], abs=0.05), name


@pytest.mark.parametrize("mode", registry.MODES)
def test_steps_are_those_of_their_episodes_and_the_books_hold_true_returns(mode: str) -> None:
    """A step's reward is its number, so that the return of n steps is n (n + 1) / 2, and no other."""
    ledger = Ledger()
    with collecting(mode, "toy_envs:Audit", num_workers=3, short=7, long=40) as collector:
        for _ in range(5):
            segments: list[Segment] = []
            while (missing := 200 - sum(segment.num_steps for segment in segments)) > 0:
                segments += collector.collect(Demand(steps=missing))
            ledger.account(segments)
            ledger.finish_update()
            ledger.check_balance(collector.counts())
            for segment in segments:
                inside = ~segment.ended[:-1]
                np.testing.assert_array_equal(segment.next_obs[:-1][inside], segment.obs[1:][inside])
                np.testing.assert_array_equal(segment.next_obs[..., 0], segment.obs[..., 0], err_msg="another episode")
                np.testing.assert_allclose(segment.next_obs[..., 1] * 100, segment.reward, rtol=1e-5)
    assert ledger.episodes > 10
    by_length = {int(length) for length in ledger.summary(collector.counts())["episodes_by_length"]}
    assert by_length <= {7, 40}
    assert {total for total, _ in ledger.recent_episodes} <= {7 * 8 / 2, 40 * 41 / 2}


@pytest.mark.parametrize("mode", [mode for mode in WHOLE if mode != "sequential"])
@pytest.mark.parametrize("env", ["CartPole-v1", "toy_envs:Audit"])
def test_rounds_equal_those_of_sequential(mode: str, env: str) -> None:
    """The first has a time limit, the second has none."""
    demands = (Demand(episodes=5), Demand(steps=200), Demand(steps=700), Demand(episodes=5, steps_left=30))
    with collecting("sequential", env, deterministic=True) as collector:
        expected = [collector.collect(demand) for demand in demands]
    with collecting(mode, env, num_workers=3, deterministic=True) as collector:
        actual = [collector.collect(demand) for demand in demands]
    for expected_round, actual_round in zip(expected, actual, strict=True):
        assert len(expected_round) == len(actual_round)
        for one, other in zip(expected_round, actual_round, strict=True):
            assert_same(one, other)


def steps_of_updates(run_dir: Path) -> list[int]:
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    return [sum(steps for columns in line["segments"] for ((_, steps, _),) in columns) for line in lines]


@pytest.mark.parametrize(
    ("mode", "max_lag", "num_workers"),
    [*((mode, 0, num) for mode in WHOLE for num in (1, 3)), *((mode, 1, 3) for mode in LAGGING_WHOLE)],
)
def test_no_update_exceeds_its_demand_by_more_than_an_episode_per_worker(
    mode: str, max_lag: int, num_workers: int, run_dir: Path
) -> None:
    """Episodes of 200 steps and updates of 500: three of them, from the first update on; the last one takes what is
    left of the run."""
    settings = {"env_args": {"short": 200, "long": 300}, "max_episode_steps": 200, "steps_per_update": 500}
    settings |= {"num_epochs": 1, "minibatch_size": 500, "hidden_sizes": (8,), "quiet": True}
    result = freerun.train(
        "toy_envs:Audit",
        mode=mode,
        num_workers=workers_for(mode, num_workers),
        max_lag=max_lag,
        total_steps=2_000,
        run_dir=run_dir,
        **settings,
    )
    assert steps_of_updates(run_dir) == [600, 600, 600, 200]
    assert result.summary["env_steps"] == 2_000
    assert result.summary["ledger"]["in_flight"] == 0, "nothing was started that no update had steps left for"


@pytest.mark.parametrize("mode", WHOLE)
def test_a_demand_in_episodes_keeps_to_the_steps_of_the_run(mode: str, run_dir: Path) -> None:
    settings = {"env_args": {"short": 100, "long": 100}, "max_episode_steps": 100, "episodes_per_update": 50}
    settings |= {"num_epochs": 1, "minibatch_size": 500, "hidden_sizes": (8,), "quiet": True}
    workers = {"num_workers": workers_for(mode, 3)}
    result = freerun.train("toy_envs:Audit", mode=mode, total_steps=1_000, run_dir=run_dir, **settings, **workers)
    assert result.summary["env_steps"] == 1_000
    assert result.summary["updates"] == 1


@pytest.mark.parametrize(("mode", "max_lag"), [*((mode, 0) for mode in WHOLE), *((mode, 4) for mode in LAGGING_WHOLE)])
def test_long_episodes_are_trained_as_often_as_they_occur(mode: str, max_lag: int, run_dir: Path) -> None:
    """Half of the episodes take 20 steps and half 200: finishing first must not mean being trained more."""
    result = freerun.train(
        "toy_envs:Audit",
        mode=mode,
        num_workers=workers_for(mode, 4),
        max_lag=max_lag,
        total_episodes=100,
        episodes_per_update=20,
        num_epochs=1,
        minibatch_size=5000,
        quiet=True,
        run_dir=run_dir,
    )
    by_length = result.summary["ledger"]["episodes_by_length"]
    assert by_length.keys() == {"20", "200"}
    # The first 100 episodes of this seed, in whatever order they finish: the share is theirs, exactly.
    assert sum(by_length.values()) == 100
    assert by_length["200"] == _num_long(100)
    assert result.summary["lag_max"] <= max_lag


def _num_long(num_episodes: int) -> int:
    env = GymnasiumFactory("toy_envs:Audit").make(1)
    return sum(bool(env.reset([episode_seed(0, number)])[0, 2] > 1) for number in range(num_episodes))


@pytest.mark.parametrize("mode", LAGGING_WHOLE)
def test_workers_go_on_while_the_learner_updates(mode: str) -> None:
    with collecting(mode, "toy_envs:Audit", num_workers=2, max_lag=2, short=5, long=5) as collector:
        first = collector.collect(Demand(episodes=4))
        deadline = time.monotonic() + 10
        while collector.counts().episodes_in_flight < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert collector.counts().episodes_in_flight == 8, "two rounds ahead"
        second = collector.collect(Demand(episodes=4))
    assert [int(segment.episode[0, 0]) for segment in first + second] == list(range(8))


@pytest.mark.parametrize("mode", WHOLE)
def test_an_empty_demand_takes_what_has_arrived_and_does_not_wait(mode: str) -> None:
    max_lag = 1 if mode in LAGGING else 0
    with collecting(mode, "toy_envs:Audit", num_workers=2, max_lag=max_lag, short=5, long=5) as collector:
        assert collector.collect(Demand()) == []
        collector.collect(Demand(episodes=3))
        arrived: list[Segment] = []
        deadline = time.monotonic() + 10
        while len(arrived) < 3 * max_lag and time.monotonic() < deadline:
            arrived += collector.collect(Demand())
        assert [int(segment.episode[0, 0]) for segment in arrived] == [3, 4, 5][: 3 * max_lag]


@pytest.mark.parametrize("mode", [mode for mode in registry.MODES if mode not in WHOLE])
def test_modes_that_hand_over_pieces_refuse_what_needs_whole_episodes(mode: str, run_dir: Path) -> None:
    with collecting(mode, "toy_envs:Audit") as collector:
        assert collector.collect(Demand()) == [] or registry.MODES[mode].traits.never_waits
        with pytest.raises(UserError, match="choose --mode freerun or pipes"):
            collector.collect(Demand(episodes=1))
    with pytest.raises(UserError, match="choose --mode freerun or pipes"):
        freerun.train("CartPole-v1", mode=mode, episodes_per_update=3, run_dir=run_dir)
    with pytest.raises(UserError, match=r"--deterministic.* choose --mode freerun"):
        freerun.train("CartPole-v1", mode=mode, deterministic=True, run_dir=run_dir)


@pytest.mark.parametrize("mode", [name for name in registry.MODES if name not in LAGGING])
def test_modes_that_take_turns_refuse_lag(mode: str) -> None:
    with pytest.raises(UserError, match="--max-lag must be 0"), collecting(mode, "toy_envs:Audit", max_lag=1):
        pass


@pytest.mark.parametrize("mode", LAGGING)
def test_workers_do_without_torch(mode: str) -> None:
    assert "torch" in sys.modules
    with collecting(mode, "toy_envs:WhereAmI", num_workers=2) as collector:
        segments = collector.collect(some(mode, 8))
    pids = {float(segment.obs[0, 0, 0]) for segment in segments}
    assert float(np.float32(psutil.Process().pid)) not in pids
    assert all((segment.obs[..., 1] == 0).all() for segment in segments)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("mode", registry.MODES)
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", EnvFailure, r"after 3 steps of the episode with seed \d+[\s\S]*ZeroDivisionError: the simulator"),
        ("nan-obs", UserError, r"observation that is not finite at step 4 of episode \d+ \(seed \d+\)"),
        ("nan-reward", UserError, r"reward that is not finite at step 3 of episode \d+ \(seed \d+\)"),
        ("shape", UserError, r"shape \(7,\) at step 4, but its observation_space says \(3,\)"),
    ],
)
def test_failures_of_the_environment_reach_the_user(mode: str, how: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), collecting(mode, "toy_envs:Broken", num_workers=1, how=how) as collector:
        collector.collect(some(mode, 1))


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("mode", LAGGING)
def test_environment_that_cannot_be_built_in_a_worker_ends_the_run_with_its_error(mode: str) -> None:
    with (
        pytest.raises(EnvFailure, match="cannot be built here"),
        collecting(mode, "toy_envs:Broken", num_workers=3, how="construct"),
    ):
        pass


@pytest.mark.parametrize("mode", registry.MODES)
def test_close_leaves_no_process(mode: str) -> None:
    before = workers()
    with collecting(mode, "toy_envs:Audit", num_workers=4, step_seconds=0.001) as collector:
        collector.collect(some(mode, 2))
        assert len(workers() - before) == (0 if mode == "sequential" else collector.num_workers)
    assert not left_of(workers() - before)


@pytest.mark.parametrize("mode", LAGGING)
def test_environments_in_workers_are_closed(mode: str, tmp_path: Path) -> None:
    with collecting(mode, "toy_envs:NotesItsEnd", num_workers=3, folder=str(tmp_path)) as collector:
        collector.collect(some(mode, 3))
    closed = {int(path.name) for path in tmp_path.iterdir()} - {os.getpid()}
    assert len(closed) == collector.num_workers


@pytest.mark.parametrize("mode", WHOLE)
def test_one_training_after_another_with_the_same_workers(mode: str) -> None:
    """Numbers go on in another range, nothing of the first training reaches the second, and nobody is restarted."""
    with collecting(mode, "CartPole-v1", max_lag=0 if registry.MODES[mode].traits.takes_turns else 1) as collector:
        before = workers()
        for series in range(3):
            if series:
                collector.renew(StartPoint(first_episode_of(series)))  # type: ignore[attr-defined]
                collector.publish(WEIGHTS, 0)
            ledger = Ledger(first_episode=first_episode_of(series))
            for _ in range(3):
                segments = collector.collect(Demand(episodes=4))
                ledger.account(segments)
                ledger.finish_update()
                ledger.check_balance(collector.counts())
                collector.publish(WEIGHTS, ledger.version)
            assert ledger.episodes == 12
            assert {training_of(int(segment.episode[0, 0])) for segment in segments} == {series}
        assert workers() == before
