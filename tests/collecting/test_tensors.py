"""Environments that are tensors, in every mode that steps them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_tensors import Counting

import freerun
from freerun.adapters import catalog
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.tensors.tensor_rollout import TensorRollout
from freerun.core import EnvFailure, HeldOutSeed, Purpose, State, TensorSegment, UserError
from freerun.persistence.checkpoint import newest
from freerun.run.deployment import SavedPolicy
from freerun.run.evaluation import evaluate, play_at_once
from freerun.settings import registry
from freerun.settings.registry import make_config
from freerun.telemetry.timeline import RecordedTimeline
from freerun.tools.cli.main import main
from freerun_envs.rough_drone import RoughDrone

MODES = [name for name, entry in registry.MODES.items() if entry.traits.tensors is not None]
SMALL = {"hidden_sizes": (8,), "quiet": True, "num_envs": 6}
OFF_POLICY = {"updates_per_step": 0.05, "learning_starts": 20, "batch_size": 16}
MODEL = {"model_hidden_sizes": (8,), "rollouts_per_step": 1.0, "model_updates_per_step": 0.05}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"num_epochs": 2},
    "sac": OFF_POLICY,
    "fastsac": OFF_POLICY,
    "dqn": {**OFF_POLICY, "env_args": {"num_choices": 3}},
    "mbpo": {**OFF_POLICY, **MODEL},
}


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the toy environment."""
    monkeypatch.setitem(catalog.TENSOR_ENVS, "toy/Counting-v0", "toy_tensors:build")
    return "toy/Counting-v0"


def rollout(num_steps: int, **options: Any) -> tuple[TensorRollout, MLPActor]:
    env = Counting(4, "cpu", options.get("fail_after"), options.get("reports_final_obs", True))
    actor = MLPActor(ActorSpec.of(env.spec, (8,), "tanh"), scalar_actions=False)
    made = TensorRollout(env, actor.on(env.device, seed=0), num_steps)
    made.load(actor.weights, 7)
    return made, actor


def segments(num: int, **options: Any) -> Iterator[TensorSegment]:
    made, _ = rollout(5, **options)
    for _ in range(num):
        yield made.collect()


def test_segments_follow_each_other_and_episodes_their_own_rules() -> None:
    parts = list(segments(4))
    names = [name for name, value in vars(parts[0]).items() if isinstance(value, torch.Tensor)]
    whole = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    for env in range(4):
        length = env + 2
        step = torch.arange(20) % length
        assert torch.equal(whole["obs"][:, env, 1], step.float())
        assert torch.equal(whole["next_obs"][:, env, 1], step + 1.0), "never the first observation of another episode"
        assert torch.equal(whole["obs"][:, env, 2], torch.div(torch.arange(20), length, rounding_mode="floor").float())
        assert torch.equal(whole["next_obs"][:, env, 2], whole["obs"][:, env, 2])
        assert torch.equal(whole["reward"][:, env], step + 1.0)
        assert torch.equal(whole["episode_length"][:, env], step + 1)
        assert torch.equal(whole["episode_return"][:, env], ((step + 1) * (step + 2) / 2).float())
        ends = "terminated" if env % 2 == 0 else "truncated"
        other = "truncated" if env % 2 == 0 else "terminated"
        assert torch.equal(whole[ends][:, env], step == length - 1)
        assert not whole[other][:, env].any()


def test_a_hidden_final_observation_is_replaced_by_the_last_one_seen() -> None:
    segment = next(segments(1, reports_final_obs=False))
    ended = segment.ended
    assert ended.any()
    assert torch.equal(segment.next_obs[ended], segment.obs[ended])
    assert torch.equal(segment.next_obs[~ended][:, 1], segment.obs[~ended][:, 1] + 1)


def test_a_segment_is_not_touched_by_the_next() -> None:
    made, _ = rollout(3)
    first = made.collect()
    kept = first.obs.clone()
    second = made.collect()
    assert torch.equal(first.obs, kept)
    assert not torch.equal(first.obs, second.obs)
    assert first.version == 7


def test_log_probabilities_are_those_of_the_actions() -> None:
    made, actor = rollout(4)
    segment = made.collect()
    obs, action = segment.obs.flatten(0, 1).numpy(), segment.action.flatten(0, 1).numpy()
    noise = ((action - actor.act(obs, None).action) / np.exp(actor.arrays["log_std"])).astype(np.float32)
    np.testing.assert_allclose(segment.log_prob.flatten().numpy(), actor.log_prob(noise, action), atol=1e-5)


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("mode", MODES)
def test_every_algorithm_learns_in_every_mode_and_the_books_balance(
    mode: str, algo: str, counting: str, run_dir: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, **ALGORITHMS[algo], "mode": mode, "algo": algo, "total_steps": 400}
    if mode == "continuous":
        settings |= {"collection_batch_size": 30, "max_queue_size": 3}
    else:
        settings["num_steps_per_env"] = 5
    result = freerun.train(counting, **settings, run_dir=run_dir)
    summary = result.summary
    assert summary["outcome"] == "finished"
    assert summary["env_steps"] >= 400
    assert summary["updates"] > 3
    ledger = summary["ledger"]
    in_books = ledger["trained"] + ledger["dropped"] + ledger["in_flight"] + ledger["handed_over_untrained"]
    assert ledger["started"] == in_books
    assert set(ledger["episodes_by_length"]) <= {str(length) for length in range(2, 8)}
    assert np.isfinite(result.policy.weights).all()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["simulator/steps"] > 0
    if mode == "sync":
        assert summary["lag_max"] == 0
    elif mode == "batch" and algo == "ppo":
        assert summary["lag_max"] <= 1
    if mode != "continuous":
        assert summary["dropped_steps"] == 0


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_batch_keeps_to_the_lag(max_lag: int, counting: str, run_dir: Path) -> None:
    options = {**SMALL, "mode": "batch", "num_steps_per_env": 4, "max_lag": max_lag, "total_steps": 1000}
    summary = freerun.train(counting, **options, run_dir=run_dir).summary
    assert summary["lag_max"] <= max_lag
    assert summary["dropped_steps"] == 0


def test_the_steps_before_learning_starts_are_not_collected_twice(counting: str, run_dir: Path) -> None:
    options = {**SMALL, **OFF_POLICY, "algo": "sac", "mode": "batch", "num_steps_per_env": 5, "max_lag": 1}
    freerun.train(counting, **{**options, "learning_starts": 600}, total_steps=900, run_dir=run_dir)
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(600, 901, 30))


def test_sync_is_the_same_each_time(counting: str, tmp_path: Path) -> None:
    options = {**SMALL, "mode": "sync", "num_steps_per_env": 4, "total_steps": 200}
    one, other = (freerun.train(counting, **options, run_dir=tmp_path / name).policy for name in "ab")
    np.testing.assert_array_equal(one.weights, other.weights)


@pytest.mark.parametrize("mode", MODES)
def test_a_simulator_that_fails_ends_the_run_with_its_own_words_and_a_policy(
    mode: str, counting: str, run_dir: Path
) -> None:
    options = {**SMALL, "mode": mode, "total_steps": 10_000, "env_args": {"fail_after": 100}}
    with pytest.raises(EnvFailure, match="the rotor fell off"):
        freerun.train(counting, **options, run_dir=run_dir)
    assert (run_dir / "policy.safetensors").exists()
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"


def test_an_update_that_fails_ends_the_simulator(counting: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from freerun.algorithms.ppo.ppo import PPO

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no such gradient")

    monkeypatch.setattr(PPO, "update", fail)
    with pytest.raises(ZeroDivisionError, match="no such gradient"):
        freerun.train(counting, **SMALL, mode="batch", run_dir=run_dir)


def test_collectors_share_the_environments(counting: str, run_dir: Path) -> None:
    options = {**SMALL, "mode": "continuous", "num_collectors": 2, "collection_batch_size": 12, "max_queue_size": 50}
    summary = freerun.train(counting, **options, total_steps=600, run_dir=run_dir).summary
    assert summary["num_workers"] == 2
    # Two simulators of three environments each: nobody has episodes of more than 4 steps.
    assert set(summary["ledger"]["episodes_by_length"]) == {"2", "3", "4"}


def test_simulators_that_are_elsewhere_are_stepped_at_the_same_time(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.TENSOR_ENVS, "toy/Elsewhere-v0", "toy_tensors:build_elsewhere")
    options = {**SMALL, "mode": "continuous", "num_collectors": 2, "collection_batch_size": 12, "max_queue_size": 4}
    summary = freerun.train("toy/Elsewhere-v0", **options, total_steps=600, run_dir=run_dir).summary
    assert summary["num_workers"] == 2
    assert summary["env_steps"] >= 600


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "batch", "deterministic": True}, "--deterministic compares whole episodes"),
        ({"mode": "batch", "episodes_per_update": 3}, "--episodes-per-update needs whole episodes"),
        ({"mode": "sync", "max_episode_steps": 3}, "--max-episode-steps is not for"),
        ({"mode": "continuous", "num_collectors": 4}, "evenly"),
        ({"mode": "sync", "max_lag": 1}, "--max-lag must be 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], sentence: str, counting: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        freerun.train(counting, **SMALL, **options, run_dir=run_dir)


def test_the_drone_learns_as_tensors_and_flies_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = RoughDrone.step

    def counted(self: RoughDrone, action: Any) -> Any:
        steps.append(1)
        return step(self, action)

    monkeypatch.setattr(RoughDrone, "step", counted)
    options = {"mode": "batch", "num_envs": 16, "env_args": {"task": "hover"}, "quiet": True}
    result = freerun.train("freerun/RoughDrone-v0", **options, total_steps=1000, eval_every=500, run_dir=run_dir)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "eval_return" in records[-1]
    assert not steps, "--eval-every flies its drones as tensors, all at once, and not one after another"
    assert evaluate(run_dir, 1).lengths[0] > 0
    assert result.summary["num_workers"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("memory", ["none", "gru", "lstm"])
def test_a_recorded_simulator_trains_the_policy_of_an_eager_one(memory: str, run_dir: Path) -> None:
    options = {"mode": "sync", "num_envs": 16, "env_args": {"task": "hover"}, "hidden_sizes": (16,), "quiet": True}
    trained = [
        freerun.train(
            "freerun/RoughDrone-v1",
            **options,
            memory=memory,
            device="cuda",
            acceleration=acceleration,
            total_steps=3000,
            run_dir=run_dir.with_name(acceleration),
        )
        for acceleration in ("none", "graph")
    ]
    eager, recorded = (result.policy.actor.weights for result in trained)
    np.testing.assert_allclose(recorded, eager, atol=1e-4)


def test_evaluation_flies_whole_episodes(run_dir: Path) -> None:
    """In training, drones begin at random step counts, so that not all episodes end at once."""
    options = {"mode": "batch", "num_envs": 8, "env_args": {"task": "hover", "episode_seconds": 0.2}, "quiet": True}
    result = freerun.train("freerun/RoughDrone-v1", **options, total_steps=200, run_dir=run_dir)
    config = SavedPolicy.find(run_dir).settings(())
    played = play_at_once(config, 8, HeldOutSeed(0, Purpose.VALIDATION), lambda _: result.policy.actor)
    assert played.lengths == 8 * [10], "nothing falls to the ground within 10 steps"


@pytest.mark.parametrize("words", [["--num-envs", "16"], []])
def test_the_drone_is_stepped_as_tensors_without_a_word(
    words: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mode is chosen by the environment; the header and config.json say which."""
    few = ["--num-steps-per-env", "4", "--total-steps", "64", "--run-dir", str(run_dir)]
    assert main(["train", "freerun/RoughDrone-v0", *words, *few]) == 0
    num_envs = 16 if words else 64
    assert f"ppo · batch, {num_envs} environments as tensors on cpu · seed 0" in capsys.readouterr().err
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["mode"], config["num_envs"], config["num_workers"]) == ("batch", num_envs, 1)


def test_python_chooses_the_same_mode_and_a_named_one_still_counts() -> None:
    assert make_config({"env": "freerun/RoughDrone-v0", "num_envs": 8}).mode == "batch"
    assert make_config({"env": "freerun/RoughDrone-v0", "mode": "freerun"}).mode == "freerun"
    assert make_config({"env": "CartPole-v1"}).mode == "freerun"


def test_workers_are_not_silently_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "freerun/RoughDrone-v0", "--num-workers", "3"]) == 2
    assert "--num-workers is not for environments that are tensors" in capsys.readouterr().err


def test_a_resumed_run_may_have_other_collectors(counting: str, run_dir: Path) -> None:
    options = {**SMALL, "mode": "continuous", "num_collectors": 2, "total_steps": 200}
    freerun.train(counting, **options, run_dir=run_dir)
    again = freerun.resume(run_dir, num_collectors=1, total_steps=400)
    assert again.summary["num_workers"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_simulator_notes_what_it_does(mode: str, counting: str, run_dir: Path) -> None:
    freerun.train(counting, **{**SMALL, "mode": mode, "total_steps": 2000}, run_dir=run_dir)
    recording = RecordedTimeline.of(run_dir)
    assert recording is not None
    grid = recording.grid()
    assert (grid.cells(0.0, grid.seconds, 1)[:, 0, State.BUSY] > 0).all()


def test_returns_are_carried_from_a_simulators_segment_to_its_next(counting: str, tmp_path: Path) -> None:
    """The deviation by which rewards are divided is the same in segments of 3 steps and of 24."""
    found = []
    for num_steps, num_collectors in ((24, 1), (3, 1), (3, 2)):
        run_dir = tmp_path / f"{num_steps}-{num_collectors}"
        options = {**SMALL, "mode": "continuous", "num_collectors": num_collectors, "max_queue_size": 50}
        options |= {"collection_batch_size": 6 * num_steps // num_collectors, "normalize_reward": True}
        freerun.train(counting, **options, steps_per_update=144, num_epochs=1, total_steps=144, run_dir=run_dir)
        found.append(newest(run_dir).state["algorithm"]["reward_scale"]["moments"])
    for moments, lengths in zip(found, ((2, 3, 4, 5, 6, 7), (2, 3, 4, 5, 6, 7), (2, 3, 4, 2, 3, 4)), strict=True):
        returns = []
        for length in lengths:
            running = 0.0
            for step in range(24):
                place = step % length
                running = place + 1 + (0.99 * running if place else 0.0)
                returns.append(running)
        assert moments["count"] == 144
        assert float(moments["variance"]) == pytest.approx(np.var(returns))
