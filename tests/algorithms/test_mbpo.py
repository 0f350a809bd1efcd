"""MBPO: schedule, pace and versions; in turn and at the same time; and what happens when the model goes wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import freerun
from freerun.algorithms.mbpo import MBPO, MBPOConfig
from freerun.core import EnvSpec, Segment, UserError

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


def test_rollouts_grow_between_two_moments() -> None:
    config = MBPOConfig(rollout_length=1, rollout_length_end=15, rollout_growth=(20_000, 100_000))
    lengths = [config.length_at(steps) for steps in (0, 20_000, 25_714, 25_715, 60_000, 99_999, 100_000, 500_000)]
    assert lengths == [1, 1, 1, 2, 8, 14, 15, 15]
    assert MBPOConfig(rollout_length=3).length_at(10**6) == 3


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
    versions = algorithm._imagined.versions[: algorithm._imagined.size]
    assert sorted(set(versions.tolist())) == list(range(1, algorithm._model.version + 1))
    assert versions[-1] == algorithm._model.version


def test_rollouts_end_where_the_model_says_so() -> None:
    algorithm = make(rollout_length=4, termination="never")
    run(algorithm, 1)
    rollouts = algorithm._rollouts
    starts = algorithm._real.draw(rollouts.num_rows).steps.obs
    rollouts.prepare(starts, algorithm._agent.weights)
    steps = rollouts.run(4)
    assert len(steps.reward) == 4 * rollouts.num_rows
    assert torch.equal(steps.obs[: rollouts.num_rows], starts)
    assert torch.equal(steps.obs[rollouts.num_rows :], steps.next_obs[: -rollouts.num_rows])

    algorithm._model._ends = lambda next_obs: next_obs[:, 0] > 0
    rollouts.prepare(starts, algorithm._agent.weights)
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
    assert algorithm._imagined.size == 1000  # 10 per step, of 100 steps
    drawn = algorithm._imagined.versions[algorithm._imagined.draw(2000).rows]
    assert drawn.min() >= algorithm._model.version - 1


def test_a_share_of_each_batch_is_real() -> None:
    algorithm = make(real_share=0.25)
    run(algorithm, 1)
    seen: list[int] = []
    learn = algorithm._agent.learn

    def spy(draw: Any) -> Any:
        seen.append(len(draw.rows))
        assert len(draw.steps.reward) == 32
        return learn(draw)

    algorithm._agent.learn = spy  # type: ignore[method-assign]
    algorithm._learn_once()
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


@pytest.mark.parametrize("stages", ["in-turn"])
def test_a_restored_learner_goes_on_bit_for_bit(stages: str) -> None:
    first, second = make(stages), make(stages)
    run(first, 3)
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        for seed in (11, 12):
            algorithm.observe([segment(50, seed=seed)])
            algorithm.update(3, 0.0)
    np.testing.assert_array_equal(first.policy.weights, second.policy.weights)


def test_an_error_in_a_stage_reaches_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make("concurrent")
    run(algorithm, 1)

    def broken(length: int) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(algorithm._rollouts, "run", broken)
    with pytest.raises(RuntimeError, match="no room"):
        run(algorithm, 1)


@pytest.mark.parametrize(
    "settings",
    [{"real_share": 2.0}, {"rollout_length": 0}, {"rollout_length": 3, "rollout_length_end": 2}, {"num_elites": 9}],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--"):
        MBPOConfig(**settings)


@pytest.mark.timeout(400)
def test_it_balances_a_pole_within_5000_steps(tmp_path: Path) -> None:
    result = freerun.train(
        "InvertedPendulum-v5",
        preset=["mbpo-inverted-pendulum", "mbpo-small"],
        mode="sequential",
        total_steps=4000,
        eval_every=500,
        quiet=True,
        run_dir=tmp_path / "run",
    )
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("eval_return", 0) for line in lines) == 1000
