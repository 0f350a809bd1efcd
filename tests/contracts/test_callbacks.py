"""What a callback can do, in every mode: see, act, change, stop, and fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import own_callbacks
import pytest

import freerun
from freerun.collecting.env_args_channel import EnvArgsChannel, with_env_args
from freerun.core import CallbackFailure, UserError
from freerun.run.replay_run import replay
from freerun.settings import registry
from freerun.tools.cli.main import main

PPO: dict[str, Any] = {"hidden_sizes": (4,), "minibatch_size": 16, "num_epochs": 1, "quiet": True}
WHOLE = [name for name, mode in registry.MODES.items() if mode.traits.whole_episodes]
SMALL: dict[str, dict[str, Any]] = {
    "continuous": {"num_collectors": 2, "num_envs": 4, "collection_batch_size": 16},
    "batch": {"num_envs": 2, "num_steps_per_env": 8},
}
KINDS: list[tuple[str, dict[str, Any]]] = [(mode, {}) for mode in registry.MODES] + [
    ("continuous", {"collector_kind": "thread"}),
    ("continuous", {"collector_kind": "process"}),
    ("freerun", {"segment_steps": 8, "envs_per_worker": 2}),
]


def workers(mode: str) -> dict[str, int]:
    """Two of them, where the mode lets the user say so."""
    return {"num_workers": 2} if registry.MODES[mode].traits.workers_flag == "--num-workers" else {}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("env", ["Level", "KeptLevel"])
@pytest.mark.parametrize(("mode", "options"), KINDS)
def test_changed_arguments_reach_every_worker_in_every_mode(
    mode: str, options: dict[str, Any], env: str, run_dir: Path
) -> None:
    """The reward of a step is the level, which an environment is given before a reset."""
    seen: list[float] = []

    def raise_level(update: freerun.Update) -> None:
        seen.append(update.metrics["return_mean"])
        update.set_env_args(level=7)
        if seen[-1] > 20:  # of the newest episodes: four steps at level 7 return 28
            update.stop("the level has arrived")

    settings = {**PPO, **SMALL.get(mode, {}), **workers(mode), **options}
    result = freerun.train(
        f"curriculum_env:{env}",
        mode=mode,
        steps_per_update=32,
        total_steps=100_000,
        run_dir=run_dir,
        on_update=raise_level,
        **settings,
    )
    assert result.summary["outcome"] == "stopped"
    assert result.summary["reason"] == "the level has arrived"
    assert result.summary["changed_by_callbacks"] == {"env_args": {"level": 7}}
    assert seen[0] == 0.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[float]]:
    return leveled("sequential", tmp_path_factory.mktemp("reference") / "run")


def leveled(mode: str, run_dir: Path, total_episodes: int = 25) -> tuple[bytes, list[float]]:
    """Train with a level for every update, deterministically; return the weights and the mean returns."""
    result = freerun.train(
        "curriculum_env:Level",
        mode=mode,
        episodes_per_update=5,
        total_episodes=total_episodes,
        deterministic=True,
        run_dir=run_dir,
        callback=[own_callbacks.NextLevel],
        **PPO,
        **workers(mode),
    )
    return result.policy.weights.tobytes(), [line["return_mean"] for line in lines(run_dir)]


@pytest.mark.parametrize("mode", [mode for mode in WHOLE if not registry.MODES[mode].traits.is_reference])
def test_a_curriculum_is_the_same_bit_for_bit_in_every_mode(
    mode: str, run_dir: Path, reference: tuple[bytes, list[float]]
) -> None:
    """The arguments of an episode follow from the version of its weights, and from nothing else."""
    assert leveled(mode, run_dir) == reference


def test_arguments_arrive_with_the_weights_of_the_next_update(reference: tuple[bytes, list[float]]) -> None:
    # Level n is set after update n, and travels with the weights of update n + 1. Returns of four steps: updates 1 and
    # 2 learn at level 0, update 3 at level 1, … ; the mean is over all 25 episodes so far.
    assert reference[1] == pytest.approx([0.0, 0.0, 4 / 3, (4 + 8) / 4, (4 + 8 + 12) / 5])


def test_a_resumed_curriculum_ends_as_if_it_had_never_stopped(
    run_dir: Path, reference: tuple[bytes, list[float]]
) -> None:
    leveled("sequential", run_dir, total_episodes=15)
    resumed = freerun.resume(run_dir, total_episodes=25)
    assert resumed.policy.weights.tobytes() == reference[0]
    assert [line["return_mean"] for line in lines(run_dir)] == reference[1]
    assert resumed.summary["changed_by_callbacks"] == {"env_args": {"level": 5}}


def test_without_its_callback_a_resumed_run_keeps_the_arguments(run_dir: Path) -> None:
    leveled("sequential", run_dir, total_episodes=15)
    freerun.resume(run_dir, total_episodes=25, callback=[])
    # Update 4 learns at level 2, which went out with the weights of update 3, and update 5 at level 3.
    assert [line["return_mean"] for line in lines(run_dir)][3:] == pytest.approx([(4 + 8) / 4, (4 + 8 + 12) / 5])


def test_a_checkpoint_with_arguments_that_nobody_wrote_is_refused() -> None:
    channel = EnvArgsChannel()
    with pytest.raises(UserError, match="set_env_args takes numbers"):
        channel.restore({"level": float("nan")}, {})


def test_arguments_that_change_the_spaces_or_do_not_exist_end_the_run_with_a_sentence(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**PPO, "mode": "sequential", "episodes_per_update": 2, "total_episodes": 20}
    for env, args, sentence in (
        ("Widened", {"level": 3}, "changes the spaces of the environment"),
        ("Level", {"colour": 3}, "do not fit the environment"),
        ("KeptLevel", {"colour": 3}, "do not fit the environment"),
        ("Level", {"level": object()}, "set_env_args takes numbers, texts, lists and dictionaries"),
        ("Level", {"level": "x" * 3000}, "set_env_args takes up to 2048 bytes"),
    ):
        with pytest.raises(UserError, match=sentence):
            freerun.train(
                f"curriculum_env:{env}",
                run_dir=tmp_path / f"{env}-{len(sentence)}-{len(str(args))}",
                on_update=lambda update, args=args: update.set_env_args(**args),
                **settings,
            )


def test_environments_that_are_tensors_are_refused(run_dir: Path) -> None:
    with pytest.raises(UserError, match="set_env_args cannot reach environments that are tensors"):
        freerun.train(
            "freerun/RoughDrone-v0",
            mode="sync",
            num_envs=4,
            num_steps_per_env=8,
            total_steps=200,
            run_dir=run_dir,
            on_update=lambda update: update.set_env_args(task="hover"),
            **PPO,
        )


def test_environments_that_are_stepped_together_are_refused(run_dir: Path) -> None:
    with pytest.raises(UserError, match="give --envs-per-worker 1"):
        freerun.train(
            "freerun/NetworkDefence-v0",
            mode="freerun",
            num_workers=1,
            envs_per_worker=2,
            segment_steps=50,
            total_steps=5000,
            steps_per_update=100,
            run_dir=run_dir,
            on_update=lambda update: update.set_env_args(num_steps=50),
            **PPO,
        )


# ---------------------------------------------------------------------------------------------- seeing and changing


def test_a_callback_sees_metrics_counts_and_a_policy_that_stays_as_it_was(run_dir: Path) -> None:
    policies = []

    def look(update: freerun.Update) -> None:
        policies.append(update.policy)
        assert update.policy.predict([0.5, 0.5]) in (0, 1)
        assert update.metrics["update"] == update.number == len(policies)
        assert update.step == update.counts.steps_delivered == 8 * len(policies)
        assert update.episodes == 2 * len(policies)
        assert update.run_dir == run_dir
        assert update.config.seed == 3
        assert freerun.evaluate(update.policy, episodes=2).returns == [0.0, 0.0]

    settings = {**PPO, "mode": "sequential", "episodes_per_update": 2, "total_episodes": 6, "seed": 3}
    result = freerun.train("curriculum_env:Level", run_dir=run_dir, on_update=look, **settings)
    weights = [policy.weights.tobytes() for policy in policies]
    assert len(set(weights)) == 3, "later updates do not change an earlier snapshot"
    assert weights[-1] == result.policy.weights.tobytes()
    assert "changed_by_callbacks" not in result.summary


SMALL_ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch_size": 16, "anneal_learning_rate": True},
    "sac": {"batch_size": 16, "learning_starts": 50},
}


@pytest.mark.parametrize("algo", SMALL_ALGORITHMS)
def test_a_callback_changes_tunables(algo: str, run_dir: Path) -> None:
    seen = []

    def change(update: freerun.Update) -> None:
        seen.append(update.tunables)
        update.change("minibatch", 8)
        update.change("learning_rate", 0.002)
        update.change("update_ratio", 2)

    settings: dict[str, Any] = {"mode": "sequential", "max_episode_steps": 25, "total_steps": 200, "quiet": True}
    result = freerun.train(
        "Pendulum-v1",
        algo=algo,
        hidden_sizes=(4,),
        steps_per_update=50,
        run_dir=run_dir,
        on_update=change,
        **settings,
        **SMALL_ALGORITHMS[algo],
    )
    assert seen[0]["minibatch"] == 16
    assert seen[0]["learning_rate"] == pytest.approx(3e-4)
    # PPO anneals the new rate: half of the run is left when its third update begins.
    rate = 0.002 if algo == "sac" else 0.001
    assert seen[2] == pytest.approx({"minibatch": 8.0, "learning_rate": rate, "update_ratio": 2.0})
    assert result.summary["changed_by_callbacks"] == {"minibatch": 8, "learning_rate": 0.002, "update_ratio": 2}
    with pytest.raises(UserError, match="its callbacks have changed settings"):
        replay(run_dir)


@pytest.mark.parametrize("algo", SMALL_ALGORITHMS)
def test_a_resumed_run_goes_on_with_changed_tunables(algo: str, tmp_path: Path) -> None:
    """Also where a changed learning rate is annealed. Such a run is not replayed after it was resumed either."""

    def change_once(update: freerun.Update) -> None:
        if update.number == 1:
            for name, value in (("minibatch", 8), ("learning_rate", 0.002), ("update_ratio", 2)):
                update.change(name, value)

    settings: dict[str, Any] = {"mode": "sequential", "max_episode_steps": 25, "steps_per_update": 50, "quiet": True}
    settings |= {"env": "Pendulum-v1", "algo": algo, "hidden_sizes": (4,), "deterministic": True}
    settings |= {**SMALL_ALGORITHMS[algo], "total_steps": 200}
    whole = freerun.train(**settings, run_dir=tmp_path / "whole", on_update=change_once)

    def stop(update: freerun.Update) -> None:
        change_once(update)
        if update.number == 2:
            update.stop("half of it")

    freerun.train(**settings, run_dir=tmp_path / "run", on_update=stop)
    last = freerun.resume(tmp_path / "run")
    np.testing.assert_array_equal(last.policy.weights, whole.policy.weights)
    assert last.summary["changed_by_callbacks"] == whole.summary["changed_by_callbacks"]
    with pytest.raises(UserError, match="its callbacks have changed settings"):
        replay(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("gamma", 0.5, "it can change minibatch, update_ratio"),
        ("minibatch", 0.5, "minibatch takes whole numbers"),
        ("learning_rate", 0.0, "learning_rate takes"),
    ],
)
def test_what_cannot_change_is_refused(name: str, value: float, sentence: str, run_dir: Path) -> None:
    settings = {**PPO, "mode": "sequential", "episodes_per_update": 2, "total_episodes": 6}
    with pytest.raises(UserError, match=sentence):
        freerun.train(
            "curriculum_env:Level", run_dir=run_dir, on_update=lambda update: update.change(name, value), **settings
        )


# ---------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("mode", registry.MODES)
def test_a_run_that_is_stopped_ends_cleanly_in_every_mode(mode: str, run_dir: Path) -> None:
    settings = {**PPO, **SMALL.get(mode, {}), **workers(mode), "steps_per_update": 32}
    result = freerun.train(
        "curriculum_env:Level",
        mode=mode,
        total_steps=100_000,
        run_dir=run_dir,
        callback=[own_callbacks.StopsAtTwo],
        **settings,
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"], summary["updates"]) == ("stopped", "two are enough", 2)
    assert (run_dir / "checkpoints" / "update-000000002").is_dir()
    assert freerun.load_policy(run_dir).weights.tobytes() == result.policy.weights.tobytes()


@pytest.mark.parametrize("how", ["request", "raise"])
def test_a_pruned_run_says_so_and_can_be_resumed(how: str, run_dir: Path) -> None:
    def prune(update: freerun.Update) -> None:
        if update.number == 1:
            if how == "raise":
                raise freerun.PruneRun("worse than the others")
            update.prune("worse than the others")

    settings = {**PPO, "mode": "sequential", "episodes_per_update": 2, "total_episodes": 6}
    result = freerun.train("curriculum_env:Level", run_dir=run_dir, on_update=prune, **settings)
    assert (result.summary["outcome"], result.summary["reason"]) == ("pruned", "worse than the others")
    assert result.summary["updates"] == 1
    resumed = freerun.resume(run_dir)
    assert (resumed.summary["outcome"], resumed.summary["updates"]) == ("finished", 3)


def test_an_error_in_a_callback_is_named_after_a_checkpoint(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "curriculum_env:Level", "--callback", "own_callbacks:Raises", "--mode", "sequential", "-q"]
    words += ["--episodes-per-update", "2", "--total-episodes", "20", "--run-dir", str(run_dir)]
    assert main(words) == 1
    printed = capsys.readouterr().err
    assert "freerun: the callback own_callbacks:Raises raised after update 2\n" in printed
    assert 'raise RuntimeError("out of ideas")' in printed
    assert (run_dir / "checkpoints" / "update-000000002").is_dir()
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"
    with pytest.raises(CallbackFailure, match="test_an_error_in_a_callback"):
        freerun.resume(run_dir, callback=[], on_update=lambda update: [][update.number])


def test_a_stopped_run_ends_with_0_and_its_reason(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "curriculum_env:Level", "--callback", "own_callbacks:StopsAtTwo", "--mode", "sequential", "-q"]
    words += ["--episodes-per-update", "2", "--total-episodes", "20", "--run-dir", str(run_dir)]
    assert main(words) == 0
    assert "Stopped (two are enough): 16 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"callback": ("own_callbacks:WithoutMethod",)}, r"has no on_update: docs/callbacks\.md says"),
        ({"callback": ("own_callbacks:Nobody",)}, "has no 'Nobody'"),
        ({"callback": ("own_callbacks:Raises",), "num_learners": 2, "num_workers": 2}, "with one learner"),
        ({"on_update": 3}, "on_update must be a function"),
    ],
)
def test_a_wrong_callback_is_answered_with_a_sentence(settings: dict[str, Any], sentence: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        freerun.train("curriculum_env:Level", run_dir=run_dir, total_steps=100, **PPO, **settings)


def test_a_folder_from_elsewhere_may_not_name_a_callback(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**PPO, "mode": "sequential", "episodes_per_update": 2, "total_episodes": 20}
    freerun.train("CartPole-v1", run_dir=run_dir, callback=[own_callbacks.StopsAtTwo], **settings)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    with pytest.raises(UserError, match="names code to run: own_callbacks:StopsAtTwo"):
        freerun.resume(run_dir)


def test_the_tail_holds_any_text(run_dir: Path) -> None:
    channel = EnvArgsChannel()
    policy = freerun.load_policy(_trained(run_dir)).actor
    wrapped, weights = with_env_args(policy, channel), policy.weights.copy()
    assert wrapped.weights.size == channel.extend(weights).size
    wrapped.load(channel.extend(weights))
    assert channel.box.newest == (0, {})
    channel.change({"a": "ä 😀", "b": [1.5, {"c": None}]})
    channel.change({"a": True})
    wrapped.load(channel.extend(weights * 2))
    assert channel.box.newest == (2, {"a": True, "b": [1.5, {"c": None}]})
    np.testing.assert_array_equal(policy.weights, weights * 2)


def _trained(run_dir: Path) -> Path:
    settings = {**PPO, "mode": "sequential", "episodes_per_update": 2, "total_episodes": 2}
    freerun.train("curriculum_env:Level", run_dir=run_dir, **settings)
    return run_dir
