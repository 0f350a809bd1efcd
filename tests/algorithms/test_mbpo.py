"""MBPO: schedule, pace and versions; in turn and at the same time; and what happens when the model goes wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import freerun
from freerun.algorithms.fastsac.large_batch_steps import LargeBatchSteps
from freerun.algorithms.mbpo.mbpo import MBPO
from freerun.algorithms.mbpo.mbpo_config import MBPOConfig, scaled_defaults
from freerun.algorithms.sac.replay_buffer import ReplaySample, StepBatch
from freerun.algorithms.sac.soft_steps import FastSoftSteps
from freerun.core import EnvSpec, RunScale, Segment, SingleLearner, UserError
from freerun.run.update_hooks import Update

ENV = EnvSpec(
    spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Box(-np.ones(1, np.float32), np.ones(1, np.float32))
)
SMALL: dict[str, Any] = {
    "hidden_sizes": (16,),
    "model_hidden_sizes": (16, 16),
    "num_models": 3,
    "num_elites": 2,
    "buffer_size": 5000,
    "learning_starts": 100,
    "steps_per_update": 50,
    "updates_per_step": 2.0,
    "rollouts_per_step": 10.0,
    "batch_size": 32,
    "steps_per_model_training": 100,
    "model_updates_per_step": 1.0,
}


def make(stages: str = "in-turn", **settings: Any) -> MBPO:
    return MBPO(ENV, MBPOConfig(**{**SMALL, "stages": stages, **settings}), 0, "cpu", False)


def segment(num_steps: int, seed: int = 0) -> Segment:
    rng = np.random.default_rng(seed)
    shape = (num_steps, 1)
    obs = rng.normal(size=(*shape, 2)).astype(np.float32)
    action = rng.uniform(-1, 1, (*shape, 1)).astype(np.float32)
    return Segment(
        obs=obs,
        action=action,
        log_prob=np.zeros(shape, np.float32),
        reward=obs[..., 0],
        terminated=obs[..., 1] > 1.5,
        truncated=np.zeros(shape, np.bool_),
        next_obs=obs + 0.1 * action,
        version=np.zeros(shape, np.int64),
        episode=np.zeros(shape, np.int64),
        seconds=0.0,
    )


def run(algorithm: MBPO, num_updates: int) -> list[dict[str, float]]:
    history = []
    for version in range(num_updates):
        algorithm.observe([segment(algorithm.demand().steps, seed=version)])
        history.append(algorithm.update(version, 0.0))
    return history


def test_fast_agents_learn_from_sums_of_real_rewards_and_the_model_from_single_ones() -> None:
    algorithm = make(agent="fast", num_return_steps=3, gamma=0.5)
    steps = segment(4)
    steps.reward[:, 0] = 1, 2, 3, 4
    steps.terminated[:] = False
    algorithm.observe([steps])
    single, summed_up = algorithm.real_buffer.newest(4), algorithm.agent_buffer.newest(4)
    assert single.reward.tolist() == [1, 2, 3, 4]
    # 1 + 2 / 2 + 3 / 4, 2 + 3 / 2 + 4 / 4, and at the end of the segment fewer rewards: 3 + 4 / 2, 4
    assert summed_up.reward.tolist() == [2.75, 4.5, 5.0, 4.0]
    # What follows counts gamma * (1 - lost): 1/8 after three rewards, 1/8, 1/4 after two, 1/2 after one.
    assert (0.5 * (1 - summed_up.terminated)).tolist() == [0.125, 0.125, 0.25, 0.5]
    assert torch.equal(summed_up.next_obs[0], torch.from_numpy(steps.next_obs[2, 0]))
    assert torch.equal(single.next_obs[0], torch.from_numpy(steps.next_obs[0, 0]))


def test_fast_agents_are_fast_sacs_and_torch_computes_their_gradients() -> None:
    config = MBPOConfig(agent="fast")
    assert MBPO.traits.computed_by is not None
    assert MBPO.traits.computed_by(config, "cpu") == "torch"
    assert MBPO.traits.computed_by(MBPOConfig(), "cpu") == "numpy"
    assert MBPO.traits.learner_note is not None
    assert MBPO.traits.learner_note(config, "cuda").endswith("torch learner")
    assert isinstance(make(agent="fast").agent.soft_steps, LargeBatchSteps)
    assert isinstance(make().agent.soft_steps, FastSoftSteps)
    with pytest.raises(UserError, match="--learner fast has no gradients of --agent fast"):
        MBPOConfig(agent="fast", learner="fast")


def test_without_sums_a_fast_agent_shares_the_models_buffer() -> None:
    algorithm = make(agent="fast", num_return_steps=1)
    assert algorithm.agent_buffer is algorithm.real_buffer
    assert np.isfinite(run(algorithm, 3)[-1]["critic_loss"])


def test_several_learners_do_not_share_sums_of_rewards() -> None:
    class TwoLearners(SingleLearner):
        count = 2

    settings: dict[str, Any] = {**SMALL, "agent": "fast", "stages": "in-turn", "acceleration": "none"}
    with pytest.raises(UserError, match="give --num-return-steps 1"):
        MBPO(ENV, MBPOConfig(**settings), 0, "cpu", False, TwoLearners())


def test_rollouts_grow_between_two_moments() -> None:
    growth: dict[str, Any] = {"rollout_length": 1, "rollout_length_end": 15, "rollout_growth": (20_000, 100_000)}
    config = MBPOConfig(learning_starts=50, **growth)
    lengths = [
        config.length_at(50 + steps) for steps in (-50, 20_000, 25_714, 25_715, 60_000, 99_999, 100_000, 500_000)
    ]
    assert lengths == [1, 1, 1, 2, 8, 14, 15, 15]
    assert MBPOConfig(rollout_length=3).length_at(10**6) == 3
    # As in the paper's code: 5,000 steps of exploration do not count. 1 + 14 * (60,000 - 20,000) / 130,000 = 5.3
    hopper = MBPOConfig(learning_starts=5000, rollout_length=1, rollout_length_end=15, rollout_growth=(20_000, 150_000))
    assert [hopper.length_at(steps) for steps in (25_000, 65_000, 154_999, 155_000)] == [1, 5, 14, 15]


@pytest.mark.parametrize("stages", ["in-turn", "concurrent"])
def test_every_stage_keeps_its_pace(stages: str) -> None:
    *_, last = run(make(stages), 9)
    # 100 steps of which 50 count, then 8 × 50.
    assert last["real_data"] == 500
    assert last["agent_updates"] == 2 * 450
    assert last["model_data"] == 10 * 450
    assert last["model_version"] >= 4
    assert 0 < last["dynamics_updates"] <= 500


def test_in_turn_and_at_the_same_time_do_the_same_work() -> None:
    in_turn, concurrent = (run(make(stages), 9)[-1] for stages in ("in-turn", "concurrent"))
    for name in ("real_data", "model_data", "agent_updates"):
        assert in_turn[name] == concurrent[name]


def test_what_the_model_makes_carries_its_version() -> None:
    algorithm = make()
    run(algorithm, 5)
    versions = algorithm.model_buffer.versions[: algorithm.model_buffer.size]
    assert sorted(set(versions.tolist())) == list(range(1, algorithm.model.version + 1))
    assert versions[-1] == algorithm.model.version


def test_rollouts_end_where_the_model_says_so() -> None:
    algorithm = make(rollout_length=4, termination="never")
    run(algorithm, 1)
    rollouts = algorithm.rollouts
    starts = algorithm.real_buffer.sample(rollouts.num_rows).steps.obs
    rollouts.prepare(starts, algorithm.agent.weights)
    steps = rollouts.run(4)
    assert len(steps.reward) == 4 * rollouts.num_rows
    assert torch.equal(steps.obs[: rollouts.num_rows], starts)
    assert torch.equal(steps.obs[rollouts.num_rows :], steps.next_obs[: -rollouts.num_rows])

    algorithm.model.termination = lambda next_obs: next_obs[:, 0] > 0
    rollouts.prepare(starts, algorithm.agent.weights)
    steps = rollouts.run(4)
    assert torch.equal(steps.terminated.bool(), steps.next_obs[:, 0] > 0)
    num_ended = int(steps.terminated.sum())
    assert num_ended > 0
    # Every step holds the rollouts that had not ended before it, and no others.
    rows, still = 0, rollouts.num_rows
    for _ in range(4):
        ended = steps.terminated[rows : rows + still]
        rows, still = rows + still, still - int(ended.sum())
    assert rows == len(steps.reward)


def test_model_rollouts_are_forgotten_in_time() -> None:
    algorithm = make(model_steps_kept=100)
    run(algorithm, 6)
    assert algorithm.model_buffer.size == 1000  # 10 per step, of 100 steps
    drawn = algorithm.model_buffer.versions[algorithm.model_buffer.sample(2000).rows]
    assert drawn.min() >= algorithm.model.version - 1


def test_the_model_steps_of_a_whole_update_are_kept() -> None:
    """With 512 drones an update had 12,288 steps, and the rollouts of the last 1,000 were all that was learned from."""
    algorithm = make(steps_per_update=1200, rollouts_per_step=1.0, updates_per_step=0.01, model_updates_per_step=0.01)
    run(algorithm, 2)
    assert algorithm.model_buffer.size == 1200
    assert make(steps_per_update=50).config.num_model_steps_kept == 1000
    # What a mode hands over at a time is an update, too.
    assert scaled_defaults(MBPOConfig(), RunScale(512, 24 * 512, is_tensors=True))["model_steps_kept"] == 24 * 512
    assert scaled_defaults(MBPOConfig(model_steps_kept=7), RunScale(512, 24 * 512))["model_steps_kept"] == 7


@pytest.mark.parametrize("name", ["rollouts_per_step", "model_updates_per_step", "model_learning_rate"])
def test_paces_of_nothing_are_refused(name: str) -> None:
    for value in (0.0, -1.0):
        settings: dict[str, Any] = {name: value}
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} must be above 0, not {value:g}"):
            MBPOConfig(**settings)


def drawn_of(algorithm: MBPO, num_updates: int) -> list[torch.Tensor]:
    """Run updates on buffers whose memory was filled with NaN before: every batch that the agent learns from."""
    for replay in (algorithm.real_buffer, algorithm.model_buffer):
        replay.rows.fill_(torch.nan)
    batches: list[torch.Tensor] = []
    learn = algorithm.agent.learn

    def spy(sample: ReplaySample) -> torch.Tensor:
        batches.append(torch.cat([part.reshape(len(sample.steps.reward), -1) for part in sample.steps], dim=1))
        return learn(sample)

    algorithm.agent.learn = spy  # type: ignore[method-assign]
    run(algorithm, num_updates)
    return batches


@pytest.mark.parametrize("stages", ["in-turn", "concurrent"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_elites": 3, "num_models": 3},  # 167 rows for each of 3 elites are more than the 500 that are due
        {"num_elites": 12, "num_models": 12},
        {"num_elites": 14, "num_models": 14},
        {"num_elites": 5, "num_models": 7, "steps_per_update": 8, "rollouts_per_step": 33.0},
        {"rollouts_per_step": 0.03},  # 1.5 rollouts per update, of which each elite needs one
        {"rollouts_per_step": 0.0005},  # less than one model step for all the steps that are kept
    ],
    ids=str,
)
def test_the_first_update_has_model_steps_to_learn_from(stages: str, settings: dict[str, Any]) -> None:
    algorithm = make(stages, **settings)
    batches = drawn_of(algorithm, 3)
    num_steps = settings.get("steps_per_update", 50)
    assert len(batches) == 2 * 3 * num_steps
    assert all(batch.isfinite().all() for batch in batches)
    # Rows keep the declared pace, but for a batch that is not complete yet, or one that was made early.
    due = 3 * num_steps * settings.get("rollouts_per_step", 10.0)
    num_rows = algorithm.rollouts.num_rows
    assert num_rows % algorithm.config.num_elites == 0
    assert abs(algorithm.model_buffer.total - due) <= num_rows


@given(
    num_elites=st.integers(1, 14),
    steps_per_update=st.integers(1, 40),
    rollouts_per_step=st.floats(0.001, 12),
    model_steps_kept=st.integers(1, 60),
    rollout_length_end=st.integers(1, 3),
    real_share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    replay=st.sampled_from(["uniform", "prioritised", "recency"]),
)
@settings(max_examples=60, deadline=None)
def test_every_row_that_is_drawn_has_been_written(num_elites: int, **chosen: Any) -> None:
    algorithm = make(
        num_models=num_elites,
        num_elites=num_elites,
        hidden_sizes=(4,),
        model_hidden_sizes=(4,),
        learning_starts=10,
        updates_per_step=0.5,
        model_updates_per_step=0.1,
        model_batch_size=8,
        batch_size=8,
        rollout_growth=(20, 40),
        buffer_size=50,
        **chosen,
    )
    for replay in (algorithm.real_buffer, algorithm.model_buffer):
        replay.rows.fill_(torch.nan)
    for version in range(4):
        algorithm.observe([segment(algorithm.demand().steps, seed=version)])
        algorithm.update(version, 0.0)
        # A longer rollout never overwrites a part of itself.
        assert algorithm.rollouts.num_rows * algorithm.config.length_at(10**6) <= algorithm.model_buffer.capacity
        for replay in (algorithm.real_buffer, algorithm.model_buffer):
            assert all(part.isfinite().all() for part in replay.sample(200).steps)


def test_the_agent_waits_for_model_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient steps that could not be taken are made up for, once there is something to learn from."""
    algorithm = make()
    with monkeypatch.context() as patched:
        patched.setattr(algorithm.rollouts, "run", lambda length: nothing())
        assert run(algorithm, 2)[-1]["agent_updates"] == 0
    assert run(algorithm, 1)[-1]["agent_updates"] == 2 * 150


@pytest.mark.parametrize("stages", ["in-turn", "concurrent"])
def test_model_steps_that_are_not_finite_are_left_out_counted_and_said_once(
    stages: str, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make(stages, rollout_length=2, termination="never")
    run(algorithm, 1)
    predict = algorithm.model.predict
    calls = 0

    def broken(obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the first step three rollouts of each batch break; they must not count again in the second."""
        nonlocal calls
        calls += 1
        next_obs, reward, ended = predict(obs, action)
        if calls % 2:
            next_obs[7, 0], next_obs[8, 1], reward[9] = torch.nan, torch.inf, -torch.inf
            ended[9] = True  # also where the rollout ends there: 0 times NaN is NaN
        return next_obs, reward, ended

    algorithm.model.predict = broken  # type: ignore[method-assign]
    rows_before = algorithm.model_buffer.total
    with caplog.at_level(logging.WARNING, "freerun"):
        history = run(algorithm, 3)
    assert [line["model_steps_rejected"] for line in history] == [3, 3, 3]
    assert caplog.text.count("made 3 steps that are not finite") == 1
    # Each update makes 500 rollouts of 2 steps, of which three break in the first step and have no second.
    assert algorithm.model_buffer.total - rows_before == 3 * (2 * 500 - 6)
    assert all(part.isfinite().all() for part in algorithm.model_buffer.newest(algorithm.model_buffer.size))
    assert [line["bad_gradients"] for line in history] == [0, 0, 0]
    assert all(np.isfinite(line["critic_loss"]) for line in history)


def nothing() -> StepBatch:
    return StepBatch(torch.empty(0, 2), torch.empty(0, 1), torch.empty(0), torch.empty(0, 2), torch.empty(0))


def test_a_share_of_each_batch_is_real() -> None:
    algorithm = make(real_share=0.25)
    run(algorithm, 1)
    seen: list[int] = []
    learn = algorithm.agent.learn

    def spy(sample: Any) -> Any:
        seen.append(len(sample.rows))
        assert len(sample.steps.reward) == 32
        return learn(sample)

    algorithm.agent.learn = spy  # type: ignore[method-assign]
    algorithm.take_gradient_steps(1)
    assert seen == [8]


@pytest.mark.parametrize("stages", ["in-turn", "concurrent"])
def test_training_goes_on_when_the_model_diverges(stages: str, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = make(stages, model_learning_rate=1e6, model_updates_per_step=2.0)
    with caplog.at_level(logging.WARNING, "freerun"):
        *_, last = run(algorithm, 7)
    assert last["model_rollbacks"] >= 1
    assert "diverged" in caplog.text
    assert np.isfinite(algorithm.policy.weights).all()
    assert last["agent_updates"] == 2 * 350


@pytest.mark.parametrize("stages", ["in-turn", "concurrent"])
def test_a_restored_learner_goes_on_bit_for_bit(stages: str) -> None:
    """There is room for rollouts of 6 steps, and they still have one: most of what the buffer holds has expired."""
    first, second = (
        make(stages, model_steps_kept=50, rollout_length_end=6, rollout_growth=(10_000, 20_000)) for _ in range(2)
    )
    run(first, 6)
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        assert algorithm.model_buffer.size == 6 * 500
        drawn = algorithm.model_buffer.sample(5000).rows
        assert drawn.min() >= 2500  # 10 rollouts per step, of 50 steps
        for seed in (11, 12):
            algorithm.observe([segment(50, seed=seed)])
            algorithm.update(3, 0.0)
    np.testing.assert_array_equal(first.policy.weights, second.policy.weights)


def test_an_error_in_a_stage_reaches_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make("concurrent")
    run(algorithm, 1)

    def broken(length: int) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(algorithm.rollouts, "run", broken)
    with pytest.raises(RuntimeError, match="no room"):
        run(algorithm, 1)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_first_steps_of_which_none_could_be_held_out_are_refused(num_steps: int) -> None:
    with pytest.raises(UserError, match=r"needs 5 steps for its first training.*--learning-starts"):
        MBPOConfig(learning_starts=num_steps, steps_per_update=num_steps)
    with pytest.raises(UserError, match="--buffer-size to at least 5"):
        MBPOConfig(learning_starts=0, buffer_size=num_steps)


def test_five_first_steps_are_enough(caplog: pytest.LogCaptureFixture) -> None:
    algorithm = make(learning_starts=5, steps_per_update=1)
    with caplog.at_level(logging.WARNING, "freerun"):
        first, *_ = run(algorithm, 3)
    assert np.isfinite(first["model_error"])
    assert not caplog.text
    assert all(part.isfinite().all() for part in algorithm.model_buffer.newest(algorithm.model_buffer.size))


@pytest.mark.parametrize(
    "settings",
    [{"real_share": 2.0}, {"rollout_length": 0}, {"rollout_length": 3, "rollout_length_end": 2}, {"num_elites": 9}],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--"):
        MBPOConfig(**settings)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_balances_a_pole_within_2500_steps(tmp_path: Path) -> None:
    """The run ends as soon as it does: every 500 steps take some five seconds."""
    evaluations: list[float] = []

    def stop_when_it_does(update: Update) -> None:
        evaluations.append(float(update.metrics.get("eval_return", 0.0)))
        if evaluations[-1] == 1000:
            update.stop("the pole stays up")

    freerun.train(
        "InvertedPendulum-v5",
        preset=["mbpo-inverted-pendulum", "mbpo-small"],
        mode="sequential",
        total_steps=2500,
        eval_every=250,
        on_update=stop_when_it_does,
        quiet=True,
        run_dir=tmp_path / "run",
    )
    assert max(evaluations) == 1000
