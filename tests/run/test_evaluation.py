"""`freerun eval` and `freerun.evaluate`: which episodes are played, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest

import freerun
from freerun.core import UserError, split_seed
from freerun.tools.cli.main import main

QUICK: dict[str, Any] = {"total_episodes": 40, "episodes_per_update": 10, "quiet": True, "mode": "sequential"}


def seeds_in(path: Path) -> set[int]:
    """The seeds of all episodes. With 0, an environment is reset once to see whether its info has action masks."""
    return {int(line) for line in path.read_text().splitlines()} - {0}


@pytest.mark.parametrize("chosen", [[], ["--seed", "4"]])
def test_eval_plays_episodes_that_neither_training_nor_the_choice_of_the_best_has_seen(
    chosen: list[str], run_dir: Path, tmp_path: Path
) -> None:
    """Also where the user gives the seed that the run was trained with."""
    path = tmp_path / "seeds.txt"
    freerun.train(
        "toy_envs:NotesItsSeeds",
        env_args={"path": str(path)},
        seed=4,
        eval_every=100,
        eval_episodes=20,
        run_dir=run_dir,
        **QUICK,
    )
    used = seeds_in(path)
    assert len(used) == 40 + 20, "every evaluation of --eval-every plays the same twenty episodes"
    path.unlink()
    assert main(["eval", str(run_dir), "--checkpoint", "best", "--episodes", "20", *chosen]) == 0
    fresh = seeds_in(path)
    assert len(fresh) == 20
    assert not fresh & used
    assert split_seed(max(fresh))[0] == 0, "an environment may take 32 bits"


def test_evaluate_takes_a_folder_a_loaded_policy_or_that_of_a_result(run_dir: Path) -> None:
    """Also where the environment is a function that only this process knows."""
    result = freerun.train(lambda: gymnasium.make("CartPole-v1", max_episode_steps=60), run_dir=run_dir, **QUICK)
    here = freerun.evaluate(result.policy, episodes=4, seed=1)
    assert len(here.returns) == len(here.lengths) == 4
    assert here.mean == pytest.approx(sum(here.returns) / 4)
    assert here.std == pytest.approx((sum((value - here.mean) ** 2 for value in here.returns) / 4) ** 0.5)
    assert f"return {here.mean:.2f} ± {here.std:.2f}" in str(here)
    assert freerun.evaluate(result.policy, episodes=4, seed=2).returns != here.returns

    named = run_dir.with_name("named")
    freerun.train("CartPole-v1", max_episode_steps=60, run_dir=named, **QUICK)
    policy = freerun.load_policy(named)
    of_folder = freerun.evaluate(named, episodes=4, seed=1)
    assert freerun.evaluate(str(named), episodes=4, seed=1) == of_folder
    assert freerun.evaluate(policy, episodes=4, seed=1) == of_folder
    assert freerun.evaluate(named, episodes=4, seed=1, checkpoint="newest") == of_folder
    assert freerun.evaluate(policy, episodes=4, seed=1, deterministic=False) != of_folder


def test_evaluate_refuses_what_makes_no_sense(run_dir: Path) -> None:
    result = freerun.train("CartPole-v1", run_dir=run_dir, **QUICK)
    for policy, options, message in (
        (result, {}, "not a Result"),
        (result.policy, {"checkpoint": "best"}, "leave it out"),
        (run_dir, {"episodes": 0}, "at least 1"),
        (run_dir, {"seed": -1}, "0 or more"),
    ):
        with pytest.raises(UserError, match=message):
            freerun.evaluate(policy, **options)


@pytest.mark.parametrize(
    ("env", "env_args"),
    [
        ("toy_envs:OneBit", {}),
        ("freerun/Straggler-v0", {"mean_seconds": 0.0001, "tail_seconds": 0.0001}),
        ("toy_envs:PromisesPictures", {"how": "raise"}),
        ("toy_envs:PromisesPictures", {"how": "text"}),
    ],
)
def test_an_environment_without_pictures_gets_one_clear_sentence(
    env: str, env_args: dict[str, Any], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    freerun.train(env, env_args=env_args, run_dir=run_dir, **{**QUICK, "total_episodes": 2, "episodes_per_update": 2})
    capsys.readouterr()
    assert main(["eval", str(run_dir), "--episodes", "1", "--render", str(tmp_path / "film")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "draws no pictures" in told
    assert "leave --render out" in told
    assert not (tmp_path / "film").exists()
