"""The deviation of the discounted return does not depend on the pieces in which episodes arrive."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from learner_processes import together

from freerun.algorithms.ppo import reward_scale
from freerun.algorithms.ppo.reward_scale import RewardScale
from freerun.algorithms.ppo.training_batch import TensorGrid, flatten_segments
from freerun.core import AnySegment, LearnerGroup, Segment, SingleLearner, TensorSegment

CPU = torch.device("cpu")
GAMMA = 0.95


def episode(number: int, rewards: Sequence[float], terminated: bool = True, truncated: bool = False) -> Segment:
    shape = (len(rewards), 1)
    zeros, flags = np.zeros(shape, np.float32), np.zeros((2, *shape), np.bool_)
    flags[:, -1, 0] = terminated, truncated
    return Segment(
        obs=zeros[..., None],
        action=zeros,
        log_prob=zeros,
        reward=np.array(rewards, np.float32)[:, None],
        terminated=flags[0],
        truncated=flags[1],
        next_obs=zeros[..., None],
        version=np.zeros(shape, np.int64),
        episode=np.full(shape, number),
        seconds=0.0,
    )


def episodes(num: int = 12) -> list[Segment]:
    """Of 1 to 90 steps with rewards around 1, so that returns grow for some 20 steps: half end in a truncation."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 91, num)
    return [
        episode(number, rng.normal(1.0, 0.5, length).tolist(), terminated=number % 2 == 0, truncated=number % 2 == 1)
        for number, length in enumerate(lengths)
    ]


def beside(parts: Sequence[Segment]) -> Segment:
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=1)
        for name in ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs", "version", "episode")
    }
    return Segment(**arrays, seconds=0.0)


def lane(played: Sequence[Segment]) -> Segment:
    """One environment that plays these episodes, one after another."""
    names = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs", "version", "episode")
    return Segment(**{name: np.concatenate([getattr(part, name) for part in played]) for name in names}, seconds=0.0)


def cut(whole: Segment, num_steps: int) -> list[Segment]:
    """Segments of so many steps of all lanes; the last one is shorter."""
    return [
        beside([whole.part(start, start + num_steps, column) for column in range(whole.reward.shape[1])])
        for start in range(0, len(whole.reward), num_steps)
    ]


def update(scaling: RewardScale, segments: Sequence[AnySegment], group: LearnerGroup) -> float:
    """Add segments as PPO does, tensors as a grid and arrays as a flat batch; return the factor of rewards."""
    tensors = [segment for segment in segments if isinstance(segment, TensorSegment)]
    if tensors:
        grid = TensorGrid.of(tensors, CPU, 0)
        return scaling(tensors, grid.reward, grid.ended, group)
    flat = flatten_segments(segments, CPU)
    return scaling(segments, flat.reward[flat.rows], flat.ended[flat.rows], group, flat.mask)


def scale(updates: Sequence[Sequence[AnySegment]], group: LearnerGroup | None = None) -> RewardScale:
    scaling = RewardScale(GAMMA)
    for segments in updates:
        update(scaling, segments, group or SingleLearner())
    return scaling


def moments(scaling: RewardScale) -> tuple[float, float, float]:
    found = scaling.moments
    return found.count, float(found.mean), float(found.variance)


def by_hand(played: Sequence[Segment]) -> tuple[float, float, float]:
    returns = []
    for segment in played:
        running = 0.0
        for reward in segment.reward[:, 0].tolist():
            running = reward + GAMMA * running
            returns.append(running)
    return len(returns), float(np.mean(returns)), float(np.var(returns))


@pytest.mark.parametrize("num_steps", [1, 8, 24])
@pytest.mark.parametrize("per_update", [1, 3, 1000])
def test_segments_give_the_statistics_of_whole_episodes(num_steps: int, per_update: int) -> None:
    """Also where several segments of an environment lie in one update."""
    played = episodes()
    whole = scale([played])
    assert moments(whole) == pytest.approx(by_hand(played))
    segments = cut(lane(played), num_steps)
    updates = [segments[first : first + per_update] for first in range(0, len(segments), per_update)]
    assert moments(scale(updates)) == pytest.approx(moments(whole), rel=1e-9)


@pytest.mark.parametrize("num_steps", [8, 24])
def test_environments_beside_each_other_have_a_return_each(num_steps: int) -> None:
    rng = np.random.default_rng(3)
    lengths = [[30, 50, 20], [70, 30], [100]]
    numbers = iter(range(6))
    played = [[episode(next(numbers), rng.normal(1, 1, length).tolist()) for length in column] for column in lengths]
    whole = scale([[segment for column in played for segment in column]])
    segments = cut(beside([lane(column) for column in played]), num_steps)
    assert moments(scale([[segment] for segment in segments])) == pytest.approx(moments(whole), rel=1e-9)


def test_an_episode_that_lost_steps_goes_on_with_what_it_had() -> None:
    rewards = [1.0] * 10
    first, _, last = cut(episode(4, rewards), 4)
    last.after_gap = np.ones_like(last.episode, np.bool_)  # four steps before it were dropped
    scaling = scale([[first], [last]])
    running, returns = 0.0, []
    for reward in rewards[:6]:
        running = reward + GAMMA * running
        returns.append(running)
    assert moments(scaling) == pytest.approx((6, np.mean(returns), np.var(returns)))
    assert scaling.state_dict()["of_episodes"] == {}, "it has ended"


def test_episodes_that_are_never_continued_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_scale, "MAX_OPEN_EPISODES", 3)
    open_ones = [episode(number, [1.0], terminated=False) for number in range(4)]
    scaling = scale([open_ones, [open_ones[1]], [episode(7, [1.0], terminated=False)]])
    assert list(scaling.state_dict()["of_episodes"]) == [3, 1, 7]


def as_tensors(part: Segment, worker: int = 0) -> TensorSegment:
    names = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs")
    tensors: dict[str, Any] = {name: torch.from_numpy(getattr(part, name)) for name in names}
    nothing = torch.zeros_like(tensors["reward"])
    lengths = lengths_in(part)
    return TensorSegment(
        **tensors, episode_return=nothing, episode_length=lengths, version=0, seconds=0.0, worker=worker
    )


def lengths_in(part: Segment) -> torch.Tensor:
    return torch.from_numpy(part.version + 1)  # where these tests note the step within the episode


def numbered(whole: Segment) -> Segment:
    """Every step with its place in its episode, which a simulator's segments tell."""
    for column in range(whole.reward.shape[1]):
        place = 0
        for step in range(len(whole.reward)):
            whole.version[step, column] = place
            place = 0 if whole.ended[step, column] else place + 1
    return whole


@pytest.mark.parametrize("num_steps", [8, 24])
def test_tensors_of_several_simulators_too(num_steps: int) -> None:
    rng = np.random.default_rng(5)
    lengths = [[24, 72], [96], [40, 56], [1, 95]]
    numbers = iter(range(9))
    played = [[episode(next(numbers), rng.normal(1, 1, length).tolist()) for length in column] for column in lengths]
    whole = scale([[segment for column in played for segment in column]])
    simulators = [numbered(beside([lane(column) for column in played[first : first + 2]])) for first in (0, 2)]
    pieces = [cut(simulator, num_steps) for simulator in simulators]
    together_ = [[as_tensors(part, worker) for worker, part in enumerate(parts)] for parts in zip(*pieces, strict=True)]
    assert moments(scale(together_)) == pytest.approx(moments(whole), rel=1e-9)
    in_turn = [[segment] for segments in together_ for segment in segments]
    assert moments(scale(in_turn)) == pytest.approx(moments(whole), rel=1e-9)
    every_second = [first + second for first, second in zip(together_[::2], together_[1::2], strict=True)]
    assert moments(scale(every_second)) == pytest.approx(moments(whole), rel=1e-9)


def test_a_simulator_that_began_anew_begins_new_returns() -> None:
    part = numbered(beside([episode(number, [1.0] * 4, terminated=False) for number in range(2)]))
    twice = scale([[as_tensors(part)], [as_tensors(part)]])
    assert moments(twice) == pytest.approx((16, *moments(scale([[as_tensors(part)]]))[1:]))


@pytest.mark.parametrize("tensors", [False, True])
def test_the_state_continues_in_the_middle_of_episodes(tensors: bool) -> None:
    whole = numbered(beside([episode(number, [1.0, 2.0, 3.0, 4.0] * 6) for number in range(2)]))
    updates: list[list[AnySegment]] = [[as_tensors(part) if tensors else part] for part in cut(whole, 8)]
    first, second = scale(updates[:1]), RewardScale(GAMMA)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for scaling in (first, second):
        for segments in updates[1:]:
            update(scaling, segments, SingleLearner())
    assert moments(first) == moments(second)
    assert moments(first) == pytest.approx(moments(scale([[whole]])))


def test_learners_that_share_episodes_find_the_statistics_of_one() -> None:
    expected = moments(scale([episodes()]))
    for found in together(2, scaled_by_one_of_several):
        assert found == pytest.approx(expected, rel=1e-9)


def scaled_by_one_of_several(group: LearnerGroup) -> tuple[float, float, float]:
    mine = cut(lane([played for played in episodes() if played.episode[0, 0] % group.count == group.index]), 8)
    most = max(group.gather(len(mine)))
    empty = mine[0].part(0, 0, 0)
    return moments(scale([[mine[place] if place < len(mine) else empty] for place in range(most)], group))


# ---------------------------------------------------------------------------------------------- Gymnasium's wrapper


class Rewards(gymnasium.Env[Any, Any]):
    """Hands out given rewards; episodes end where it is told so."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, rewards: Sequence[float], terminated: Sequence[int] = (), truncated: Sequence[int] = ()) -> None:
        self._steps = iter([(r, place in terminated, place in truncated) for place, r in enumerate(rewards)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), *next(self._steps), {}


@pytest.mark.parametrize("num_steps", [8, 24, 480])
def test_within_an_episode_it_is_gymnasiums(num_steps: int) -> None:
    rewards = np.random.default_rng(1).normal(1, 1, 480).astype(np.float32)
    env = gymnasium.wrappers.NormalizeReward(Rewards(rewards.tolist()), gamma=GAMMA)
    env.reset()
    last = [env.step(0)[1] for _ in rewards][-1]
    segments = cut(episode(0, rewards.tolist(), terminated=False), num_steps)
    scaling = RewardScale(GAMMA)
    for segment in segments:
        factor = update(scaling, [segment], SingleLearner())
    # Its count begins with 0.0001 of a step, and its sums are of another order: hence the tolerance.
    assert float(scaling.moments.variance) == pytest.approx(float(env.return_rms.var), rel=1e-4)
    assert float(rewards[-1]) * factor == pytest.approx(float(last), rel=1e-4)


def test_environments_beside_each_other_are_gymnasiums_too() -> None:
    rewards = np.random.default_rng(1).normal(1, 1, (3, 480)).astype(np.float32)
    vector = gymnasium.vector.SyncVectorEnv([lambda row=row: Rewards(row.tolist()) for row in rewards])  # type: ignore[misc]
    env = gymnasium.wrappers.vector.NormalizeReward(vector, gamma=GAMMA)
    env.reset()
    for _ in range(480):
        env.step(np.zeros(3, np.int64))
    whole = beside([episode(number, row.tolist(), terminated=False) for number, row in enumerate(rewards)])
    found = scale([[segment] for segment in cut(whole, 24)])
    assert float(found.moments.variance) == pytest.approx(float(env.return_rms.var), rel=1e-4)


def test_at_the_end_of_an_episode_it_differs_from_gymnasiums_on_purpose() -> None:
    """Two episodes with rewards of 1, 1; γ is 0.5. Ours are the returns of each episode, however it ends."""
    for terminated, theirs in ((True, [1.0, 1.0, 1.5, 1.0]), (False, [1.0, 1.5, 1.75, 1.875])):
        ends = {"terminated" if terminated else "truncated": (1, 3)}
        env = gymnasium.wrappers.NormalizeReward(Rewards([1.0] * 4, **ends), gamma=0.5)
        returns = []
        for _ in range(4):
            env.step(0)
            returns.append(float(env.discounted_reward.item()))
        assert returns == theirs
        scaling = RewardScale(0.5)
        segments = [episode(number, [1.0, 1.0], terminated, not terminated) for number in range(2)]
        update(scaling, segments, SingleLearner())
        assert moments(scaling) == pytest.approx((4, np.mean([1, 1.5, 1, 1.5]), np.var([1, 1.5, 1, 1.5])))
