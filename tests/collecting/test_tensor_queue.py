"""The queue of tensor environments: what it keeps and drops, what it counts, and how --adapt resizes it."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from toy_tensors import Counting

import freerun
from freerun.adapters import catalog
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.modes.continuous import ContinuousConfig
from freerun.collecting.scheduling.drop_statistics import DropStatistics
from freerun.collecting.tensors.tensor_drops import EpisodeEnds, TensorDrops
from freerun.collecting.tensors.tensor_rollout import TensorRollout
from freerun.collecting.tensors.tensor_stream import TensorStream
from freerun.core import CollectorSettings, Counts, Demand, TensorSegment, TensorStep, UserError
from freerun.settings import registry

NUM_ENVS, NUM_STEPS = 4, 5
"""Environment i has episodes of i + 2 steps, so of 2, 3, 4 and 5."""
MODES = [name for name, entry in registry.MODES.items() if entry.traits.tensors is not None]
QUEUE_MODES = [name for name in MODES if (tensors := registry.MODES[name].traits.tensors) and tensors.resizable]
SMALL: dict[str, Any] = {"hidden_sizes": (8,), "quiet": True, "num_envs": 6}


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(catalog.TENSOR_ENVS, "toy/Counting-v0", "toy_tensors:build")
    return "toy/Counting-v0"


def make_actor(env: Counting) -> MLPActor:
    return MLPActor(ActorSpec.of(env.spec, (8,), "tanh"), scalar_actions=False)


def segments() -> Iterator[TensorSegment]:
    env = Counting(NUM_ENVS, "cpu", None, reports_final_obs=True)
    rollout = TensorRollout(env, make_actor(env).on(env.device, seed=0), NUM_STEPS)
    while True:
        yield rollout.collect()


def drops_of(is_dropped: list[bool], order: list[int] | None = None) -> TensorDrops:
    """What is counted where these segments of one worker are dropped, and decided about in this order."""
    drops = TensorDrops([NUM_ENVS], Counts())
    made = list(itertools.islice(segments(), len(is_dropped)))
    for number in order or range(len(made)):
        drops.note(made[number], EpisodeEnds.of(made[number]), is_dropped[number])
    return drops


def test_segments_are_numbered() -> None:
    assert [segment.number for segment in itertools.islice(segments(), 3)] == [0, 1, 2]


def test_dropped_steps_are_counted_by_the_length_of_their_episode() -> None:
    """Of 15 steps the middle 5, steps 5 to 9, are dropped.

    - length 2 ends after steps 1, 3, 5, 7, 9, …: the episodes of steps 4–5, 6–7 and 8–9 lose 1 + 2 + 2 = 5 steps.
    - length 3 ends after 2, 5, 8, 11, …: 3–5 loses 1, 6–8 loses 3, 9–11 loses 1.
    - length 4 ends after 3, 7, 11, …: 4–7 loses 3, 8–11 loses 2.
    - length 5 ends after 4, 9, 14: the episode of steps 5–9 is lost whole.
    """
    drops = drops_of([False, True, False])
    assert drops.statistics.by_length == {2: 5, 3: 5, 4: 5, 5: 5}
    assert drops.statistics.steps == 20
    assert drops.statistics.by_worker == {0: 20}


def test_an_episode_in_progress_has_no_length_yet() -> None:
    # Steps 0 to 4 are dropped. Of lengths 2, 3 and 4 the episodes of steps 4, 3–4 and 4 go on.
    assert drops_of([True]).statistics.by_length == {2: 4, 3: 3, 4: 4, 5: 5}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_of_taking_does_not_matter(order: tuple[int, ...]) -> None:
    is_dropped = [True, False, True, False]
    expected, found = drops_of(is_dropped).statistics, drops_of(is_dropped, list(order)).statistics
    assert found.by_length == expected.by_length
    assert found.steps == expected.steps


def test_what_is_rejected_gives_up_the_episodes_in_progress() -> None:
    drops, (first, rejected) = TensorDrops([NUM_ENVS], Counts()), itertools.islice(segments(), 2)
    drops.note(first, EpisodeEnds.of(first), is_dropped=True)
    before = dict(drops.statistics.by_length)
    drops.note_rejected(rejected)
    fresh = next(segments())
    fresh.number = 2
    drops.note(fresh, EpisodeEnds.of(fresh), is_dropped=False)
    assert drops.statistics.by_length == before, "the new episodes have lost nothing"
    assert drops.statistics.steps == 2 * NUM_STEPS * NUM_ENVS


def test_many_episodes_at_once_count_as_one_after_another() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, 500)
    num_dropped = rng.integers(0, 2, 500) * (lengths // 2)
    single, many = DropStatistics(), DropStatistics()
    for length, dropped in zip(lengths.tolist(), num_dropped.tolist(), strict=True):
        single.settle(length, dropped, ended=True)
    for part in np.split(np.arange(500), [3, 100, 101]):
        many.settle_many(lengths[part], num_dropped[part])
    assert many.by_length == single.by_length
    assert single.bias != 0
    assert many.bias == pytest.approx(single.bias)


def test_drops_that_skew_the_data_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Half of each long episode is dropped, and nothing of a short one.

    Dropped steps: all of episodes of 100 steps. Kept steps: 50 of 100 steps for 10 of 10 steps, so of
    (50 · 100 + 10 · 10) / 60 = 85 steps on average. The bias is 100 / 85 − 1 = 0.18 with as many short episodes as long
    ones; with three short ones for each long one it is 100 / ((50 · 100 + 30 · 10) / 80) − 1 = 0.51.
    """
    even, skewed = DropStatistics(), DropStatistics()
    lengths, num_dropped = np.array([100, 10] * 400), np.array([50, 0] * 400)
    with caplog.at_level(logging.WARNING):
        even.settle_many(lengths, num_dropped)
        assert even.bias == pytest.approx(100 / 85 - 1, abs=1e-3)
        assert not caplog.records
        skewed.settle_many(np.array([100, 10, 10, 10] * 400), np.array([50, 0, 0, 0] * 400))
    assert skewed.bias == pytest.approx(100 / 66.25 - 1, abs=1e-2)
    assert "dropped steps skew the data" in caplog.text


# ---------------------------------------------------------------------------------------------- the queue itself


def collect_with(
    prepare: Callable[[TensorStream], None], env: Counting | None = None, **settings: Any
) -> tuple[list[TensorSegment], Counts]:
    """Wait until several segments were dropped; return what is then taken, and the counts."""
    env = env or Counting(NUM_ENVS, "cpu", None, reports_final_obs=True)
    config = ContinuousConfig(1, NUM_ENVS, 2, NUM_STEPS * NUM_ENVS, **settings)
    actor = make_actor(env)
    stream = TensorStream([env], actor, CollectorSettings(1, None, seed=0, on_nan="continue"), config)
    prepare(stream)
    taken: list[TensorSegment] = []

    def learn() -> None:
        stream.publish(actor.weights, 0)
        while stream.counts().steps_dropped < 4 * NUM_STEPS * NUM_ENVS:
            threading.Event().wait(0.01)
        taken.extend(stream.collect(Demand(steps=2 * NUM_STEPS * NUM_ENVS)))

    stream.run_with_learner(learn)
    counts = stream.counts()
    stream.close()
    return taken, counts


def test_the_oldest_is_dropped_where_nothing_is_preferred() -> None:
    taken, counts = collect_with(lambda stream: None)
    first = taken[0].number
    assert first >= 4
    assert [segment.number for segment in taken] == [first, first + 1]
    assert counts.steps_dropped % (NUM_STEPS * NUM_ENVS) == 0
    by_length = counts.steps_dropped_by_length
    assert set(by_length) == {2, 3, 4, 5}
    # All but the episodes in progress, which hold at most length − 1 steps each.
    assert counts.steps_dropped - (1 + 2 + 3 + 4) <= sum(by_length.values()) <= counts.steps_dropped


def test_the_most_important_segments_are_kept() -> None:
    taken, _ = collect_with(lambda stream: stream.prefer(lambda segment: -float(segment.number)))
    assert [segment.number for segment in taken] == [0, 1]


class OneLongEpisode(Counting):
    """The first episode of environment 0 lasts 12 steps, so it ends in segment 2. All others have 2 to 5 steps."""

    def __init__(self) -> None:
        super().__init__(NUM_ENVS, "cpu", None, reports_final_obs=True)
        self._index[0] = 10

    def step(self, action: Tensor) -> TensorStep:
        result = super().step(action)
        self._index[0] = 0 if self._num_steps >= 12 else 10
        return result


def test_segments_with_rare_lengths_are_kept() -> None:
    taken, _ = collect_with(lambda stream: None, OneLongEpisode(), queue_priority="rare-lengths")
    assert 2 in [segment.number for segment in taken]


@pytest.mark.parametrize(("priority", "algo"), [("rare-lengths", "ppo"), ("td-error", "sac"), ("td-error", "fastsac")])
def test_priorities_and_drops_in_a_run(priority: str, algo: str, counting: str, run_dir: Path) -> None:
    options = {**SMALL, "mode": "continuous", "collection_batch_size": 30, "max_queue_size": 2, "algo": algo}
    options |= {"queue_priority": priority}
    if algo != "ppo":
        options |= {"updates_per_step": 1.0, "learning_starts": 60, "batch_size": 16}
    summary = freerun.train(counting, **options, total_steps=900, run_dir=run_dir).summary
    assert summary["outcome"] == "finished"
    by_length = summary["dropped_steps_by_length"]
    assert set(by_length) <= {str(length) for length in range(2, 8)}
    assert sum(by_length.values()) <= summary["dropped_steps"]
    assert summary["ledger"]["dropped"] * 2 <= summary["dropped_steps"]


# ---------------------------------------------------------------------------------------------- --adapt


@pytest.mark.parametrize("mode", QUEUE_MODES)
def test_adapt_moves_the_queue_of_tensors(mode: str, counting: str, run_dir: Path) -> None:
    options = {**SMALL, "mode": mode, "adapt": True, "adapt_window": 0.2, "adapt_max_queue_size": 1000}
    summary = freerun.train(counting, **options, total_steps=3000, run_dir=run_dir).summary
    assert summary["outcome"] == "finished"
    assert 1 <= summary["adapted"]["queue_size"] <= 1000
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(record["adapted_queue_size"] >= 1 for record in records)


@pytest.mark.parametrize("mode", QUEUE_MODES)
def test_a_queue_that_shrinks_loses_no_account(mode: str, counting: str, run_dir: Path) -> None:
    """A callback moves the same tunable as --adapt: to 1, where the learner demands 3 segments at a time."""

    def shrink(update: Any) -> None:
        update.change("queue_size", 1 + update.number % 3)

    unit = 30 if mode == "continuous" else 5
    size = {"collection_batch_size": unit} if mode == "continuous" else {"num_steps_per_env": unit}
    options = {**SMALL, **size, "mode": mode, "steps_per_update": 90}
    summary = freerun.train(counting, **options, total_steps=1800, on_update=shrink, run_dir=run_dir).summary
    assert summary["updates"] == 20
    ledger = summary["ledger"]
    in_books = ledger["trained"] + ledger["dropped"] + ledger["in_flight"] + ledger["handed_over_untrained"]
    assert ledger["started"] == in_books


def test_sync_has_no_queue_to_move(counting: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=r"--mode sync with environments that are tensors.*continuous, batch"):
        freerun.train(counting, **SMALL, mode="sync", adapt=True, run_dir=run_dir)
