"""The buffer of steps: what it keeps, what it draws, and how often."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.algorithms.replay import Replay, ReplayConfig, ReplayKind, Steps
from freerun.core import UserError

CPU = torch.device("cpu")


def numbered(first: int, count: int) -> tuple[Steps, torch.Tensor]:
    """Steps that can be told apart by their reward, each made by the version of the same number."""
    numbers = torch.arange(first, first + count)
    values = numbers.float()
    return Steps(values[:, None], values[:, None], values, values[:, None] + 1, torch.zeros(count)), numbers


def make(capacity: int, kind: ReplayKind = "uniform", **settings: float) -> Replay:
    return Replay(capacity, 1, 1, ReplayConfig(replay=kind, **settings), seed=0, device=CPU)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_it_holds_the_newest_steps_whole_and_draws_from_nothing_else(counts: list[int]) -> None:
    replay, total = make(10), 0
    for count in counts:
        replay.add(*numbered(total, count))
        total += count
    kept = set(range(max(0, total - 10), total))
    assert replay.size == len(kept)
    assert replay.newest(replay.size).reward.tolist() == sorted(kept)
    steps = replay.draw(400).steps
    assert set(steps.reward.tolist()) <= kept
    assert torch.equal(steps.next_obs[:, 0], steps.obs[:, 0] + 1)  # a row is one step, never parts of two
    assert torch.equal(steps.obs[:, 0], steps.reward)


def test_more_than_it_holds_at_once_leaves_the_last_of_it() -> None:
    replay = make(4)
    replay.add(*numbered(0, 11))
    assert replay.newest(4).reward.tolist() == [7, 8, 9, 10]
    assert sorted(replay.versions.tolist()) == [7, 8, 9, 10]


def test_a_limit_leaves_the_newest() -> None:
    replay = make(100)
    replay.add(*numbered(0, 130))
    replay.limit(5)
    assert set(replay.draw(500).steps.reward.tolist()) == {125.0, 126.0, 127.0, 128.0, 129.0}


def test_uniform_draws_all_alike() -> None:
    replay = make(4)
    replay.add(*numbered(0, 4))
    counts = torch.bincount(replay.draw(40_000).steps.reward.long())
    assert torch.allclose(counts / 40_000, torch.full((4,), 0.25), atol=0.01)


def test_recency_takes_half_of_its_draws_from_the_newest_quarter() -> None:
    # Age u² · N is below N / 4 where u is below 1/2.
    replay = make(1000, "recency")
    replay.add(*numbered(0, 1000))
    share = (replay.draw(40_000).steps.reward >= 750).float().mean()
    assert share.item() == pytest.approx(0.5, abs=0.01)


def test_priorities_decide_how_often_and_weights_make_up_for_it() -> None:
    replay = make(8, "prioritised", priority_exponent=1.0, priority_correction=1.0)
    replay.add(*numbered(0, 2))
    replay.prioritise(torch.tensor([0, 1]), torch.tensor([1.0, -3.0]))
    draw = replay.draw(40_000)
    assert draw.steps.reward.mean().item() == pytest.approx(0.75, abs=0.01)  # 3 of 1 + 3
    # (N · share)^-1 is 2 and 2/3; divided by the largest: 1 and 1/3.
    expected = torch.where(draw.steps.reward == 0, 1.0, 1 / 3)
    assert torch.allclose(draw.weight, expected, rtol=1e-4)
    assert (draw.weight * draw.steps.reward).sum() / draw.weight.sum() == pytest.approx(0.5, abs=0.01)


def test_new_steps_get_the_highest_priority_so_far() -> None:
    replay = make(8, "prioritised", priority_exponent=1.0)
    replay.add(*numbered(0, 2))
    replay.prioritise(torch.tensor([0, 1]), torch.tensor([0.5, 7.0]))
    replay.add(*numbered(2, 1))
    share = (replay.draw(40_000).steps.reward == 2).float().mean()
    assert share.item() == pytest.approx(7 / 14.5, abs=0.01)


@pytest.mark.parametrize("kind", ["uniform", "prioritised", "recency"])
def test_a_restored_buffer_goes_on_with_the_same_draws(kind: ReplayKind) -> None:
    replay, other = make(6, kind), make(6, kind)
    replay.add(*numbered(0, 9))
    replay.draw(3)
    other.load_state_dict(replay.state_dict())
    assert torch.equal(replay.draw(50).steps.reward, other.draw(50).steps.reward)
    for each in (replay, other):
        each.add(*numbered(9, 1))
    assert torch.equal(replay.draw(50).steps.reward, other.draw(50).steps.reward)


@pytest.mark.parametrize(
    "settings", [{"buffer_size": 0}, {"priority_exponent": 1.5}, {"recency_exponent": 0.5}], ids=str
)
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match="--"):
        ReplayConfig(**settings)  # type: ignore[arg-type]
