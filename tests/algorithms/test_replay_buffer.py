"""The buffer of steps: what it keeps, what it draws, and how often."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.algorithms.sac.replay_buffer import ReplayBuffer, ReplayConfig, ReplayKind, StepBatch
from freerun.core import UserError

CPU = torch.device("cpu")


def numbered(first: int, count: int) -> tuple[StepBatch, torch.Tensor]:
    """Steps that can be told apart by their reward, each made by the version of the same number."""
    numbers = torch.arange(first, first + count)
    values = numbers.float()
    return StepBatch(values[:, None], values[:, None], values, values[:, None] + 1, torch.zeros(count)), numbers


def make(capacity: int, kind: ReplayKind = "uniform", **settings: float) -> ReplayBuffer:
    return ReplayBuffer(capacity, 1, 1, ReplayConfig(replay=kind, **settings), seed=0, device=CPU)  # type: ignore[arg-type]


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
    steps = replay.sample(400).steps
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
    replay.draw_from_newest(5)
    assert set(replay.sample(500).steps.reward.tolist()) == {125.0, 126.0, 127.0, 128.0, 129.0}


@pytest.mark.parametrize("kind", ["uniform", "prioritised", "recency"])
def test_nothing_is_drawn_from_an_empty_buffer(kind: ReplayKind) -> None:
    replay = make(4, kind)
    with pytest.raises(RuntimeError, match="the buffer is empty"):
        replay.sample(1)
    sample = replay.sample(0)
    assert sample.steps.reward.shape == sample.weight.shape == (0,)
    replay.update_priorities(sample.rows, sample.weight)


def test_uniform_draws_all_alike() -> None:
    replay = make(4)
    replay.add(*numbered(0, 4))
    counts = torch.bincount(replay.sample(40_000).steps.reward.long())
    assert torch.allclose(counts / 40_000, torch.full((4,), 0.25), atol=0.01)


def test_recency_takes_half_of_its_draws_from_the_newest_quarter() -> None:
    # Age u² · N is below N / 4 where u is below 1/2.
    replay = make(1000, "recency")
    replay.add(*numbered(0, 1000))
    share = (replay.sample(40_000).steps.reward >= 750).float().mean()
    assert share.item() == pytest.approx(0.5, abs=0.01)


def test_priorities_decide_how_often_and_weights_make_up_for_it() -> None:
    replay = make(8, "prioritised", priority_exponent=1.0, priority_correction=1.0)
    replay.add(*numbered(0, 2))
    replay.update_priorities(torch.tensor([0, 1]), torch.tensor([1.0, -3.0]))
    sample = replay.sample(40_000)
    assert sample.steps.reward.mean().item() == pytest.approx(0.75, abs=0.01)  # 3 of 1 + 3
    # (N · share)^-1 is 2 and 2/3; divided by the largest: 1 and 1/3.
    expected = torch.where(sample.steps.reward == 0, 1.0, 1 / 3)
    assert torch.allclose(sample.weight, expected, rtol=1e-4)
    assert (sample.weight * sample.steps.reward).sum() / sample.weight.sum() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("progress", "beta"), [(0.0, 0.4), (0.5, 0.7), (1.0, 1.0)])
def test_the_correction_rises_to_all_the_way_over_the_run(progress: float, beta: float) -> None:
    replay = make(8, "prioritised", priority_exponent=1.0, priority_correction=0.4)
    replay.add(*numbered(0, 2))
    replay.update_priorities(torch.tensor([0, 1]), torch.tensor([1.0, 3.0]))
    replay.anneal_beta(progress)
    sample = replay.sample(100)
    # Weights are (2 · 1/4)^-beta and (2 · 3/4)^-beta; divided by the largest: 1 and 3^-beta.
    expected = torch.where(sample.steps.reward == 0, 1.0, 3**-beta)
    assert torch.allclose(sample.weight, expected, rtol=1e-4)


def test_low_priorities_are_drawn_as_often_as_they_should_also_in_a_large_buffer() -> None:
    """In float32, 500,000 + 0.001 is 500,000: rows with that priority after half a million others were never drawn."""
    num_rows, num_draws = 1_000_000, 2_000_000
    replay = make(num_rows, "prioritised", priority_exponent=1.0)
    replay.add(*numbered(0, num_rows))
    td_error = torch.ones(num_rows)
    td_error[num_rows // 2 :] = 0.1
    td_error[-num_rows // 4 :] = 0.001
    replay.update_priorities(torch.arange(num_rows), td_error)
    counts = torch.bincount(replay.sample(num_draws).rows, minlength=num_rows).double()
    # 500,000 · 1 + 250,000 · 0.1 + 250,000 · 0.001
    total = 525_250
    for part, priority in ((slice(0, 500_000), 1.0), (slice(500_000, 750_000), 0.1), (slice(750_000, None), 0.001)):
        # In every tenth of the rows, so that none is drawn for its neighbours. Counts are Poisson: five deviations.
        for tenth in counts[part].chunk(10):
            expected = num_draws * priority * len(tenth) / total
            assert abs(tenth.sum().item() - expected) < 5 * expected**0.5
    # A row of the last part is drawn 0.004 times on average, so nearly all of its draws are of different rows.
    low = counts[750_000:]
    assert (low > 0).sum() > 0.95 * low.sum()


def test_a_td_error_that_is_not_finite_leaves_the_priority_as_it_was() -> None:
    replay = make(8, "prioritised", priority_exponent=1.0)
    replay.add(*numbered(0, 4))
    replay.update_priorities(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    replay.update_priorities(torch.arange(4), torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5]))
    assert replay.priorities[:4].tolist() == pytest.approx([1.0, 2.0, 3.0, 0.5], rel=1e-5)
    assert replay.max_priority.item() == pytest.approx(4.0)


def test_new_steps_get_the_highest_priority_so_far() -> None:
    replay = make(8, "prioritised", priority_exponent=1.0)
    replay.add(*numbered(0, 2))
    replay.update_priorities(torch.tensor([0, 1]), torch.tensor([0.5, 7.0]))
    replay.add(*numbered(2, 1))
    share = (replay.sample(40_000).steps.reward == 2).float().mean()
    assert share.item() == pytest.approx(7 / 14.5, abs=0.01)


@pytest.mark.parametrize("kind", ["uniform", "prioritised", "recency"])
def test_a_restored_buffer_goes_on_with_the_same_draws(kind: ReplayKind) -> None:
    replay, other = make(6, kind), make(6, kind)
    replay.add(*numbered(0, 9))
    replay.sample(3)
    other.load_state_dict(replay.state_dict())
    assert torch.equal(replay.sample(50).steps.reward, other.sample(50).steps.reward)
    for each in (replay, other):
        each.add(*numbered(9, 1))
    assert torch.equal(replay.sample(50).steps.reward, other.sample(50).steps.reward)


@pytest.mark.parametrize(
    "settings", [{"buffer_size": 0}, {"priority_exponent": 1.5}, {"recency_exponent": 0.5}], ids=str
)
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match="--"):
        ReplayConfig(**settings)  # type: ignore[arg-type]
