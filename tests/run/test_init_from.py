"""`--init-from`: a new run that begins with the networks and normalisers of another, and with nothing else of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import freerun
from freerun.algorithms.ppo import ppo as algorithms_ppo
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import Demand, Metrics, UserError
from freerun.persistence import checkpoint
from freerun.persistence.checkpoint import MANIFEST, STATE
from freerun.run.replay_run import replay
from freerun.tools.cli.main import main

PPO: dict[str, Any] = {
    "mode": "sequential",
    "quiet": True,
    "hidden_sizes": (8,),
    "steps_per_update": 200,
    "normalize_obs": True,
    "normalize_reward": True,
    "deterministic": True,
}
SAC: dict[str, Any] = {
    "mode": "sequential",
    "quiet": True,
    "hidden_sizes": (8, 8),
    "algo": "sac",
    "learning_starts": 60,
    "steps_per_update": 60,
    "batch_size": 16,
    "buffer_size": 500,
    "updates_per_step": 0.5,
    "max_episode_steps": 30,
    "deterministic": True,
}
MBPO: dict[str, Any] = {
    **SAC,
    "algo": "mbpo",
    "rollouts_per_step": 10.0,
    "model_hidden_sizes": (8, 8),
    "steps_per_model_training": 60,
    "model_updates_per_step": 0.2,
    "model_steps_kept": 50,
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {**PPO, "total_steps": 600}),
    "sac": ("Pendulum-v1", {**SAC, "total_steps": 240}),
    "dqn": ("CartPole-v1", {**SAC, "algo": "dqn", "total_steps": 240, "epsilon_start": 0.05, "learning_rate": 3e-4}),
    "mbpo": ("Pendulum-v1", {**MBPO, "total_steps": 180}),
}
NONE = {"learning_rate": 1e-30}
"""Too small to change a weight: what a run ends with is what it has begun with."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, (env, settings) in RUNS.items():
        freerun.train(env, run_dir=folder / name, seed=1, **settings)
    return {name: folder / name for name in RUNS}


def newest(run_dir: Path) -> dict[str, Any]:
    return checkpoint.newest(run_dir).state


def again(name: str, runs: dict[str, Path], run_dir: Path, **more: Any) -> freerun.Result:
    """A short new run from that one, with another seed."""
    env, settings = RUNS[name]
    steps = settings["steps_per_update"]
    options = {**settings, "total_steps": steps, "seed": 9, "init_from": runs[name], "run_dir": run_dir, **more}
    return freerun.train(env, **options)


@pytest.mark.parametrize("name", RUNS)
def test_a_new_run_begins_with_the_networks_and_normalisers_of_another(
    name: str, runs: dict[str, Path], run_dir: Path
) -> None:
    result = again(name, runs, run_dir, **NONE)
    before = freerun.load_policy(runs[name])
    for part, array in before.actor.arrays.items():
        if not part.startswith("obs_"):  # these move on with the observations of the new run
            np.testing.assert_array_equal(result.policy.actor.arrays[part], array, part)
    theirs, ours = newest(runs[name])["algorithm"], newest(run_dir)["algorithm"]
    if name == "ppo":
        assert ours["obs_moments"]["count"] == theirs["obs_moments"]["count"] + result.summary["env_steps"]
        assert ours["reward_scale"]["moments"]["count"] > theirs["reward_scale"]["moments"]["count"] > 0
        for part in theirs["net"]:
            if not part.startswith("obs_"):
                torch.testing.assert_close(ours["net"][part], theirs["net"][part], rtol=0, atol=0)
    else:
        for part in ("online",) if name == "dqn" else ("actor", "critics"):
            torch.testing.assert_close(ours["agent"][part], theirs["agent"][part], rtol=0, atol=0)


@pytest.mark.parametrize("name", RUNS)
def test_counters_books_data_and_randomness_are_its_own(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    """The same as those of a run that begins from nothing, with the same seed."""
    env, settings = RUNS[name]
    settings = {**settings, "total_steps": settings["steps_per_update"], "seed": 9}
    plain = freerun.train(env, run_dir=tmp_path / "plain", **settings)
    started = again(name, runs, tmp_path / "started")
    assert started.summary["updates"] == plain.summary["updates"] == 1
    ours, theirs = newest(tmp_path / "started"), newest(tmp_path / "plain")
    assert ours["update"] == 1
    assert ours["ledger"]["version"] == theirs["ledger"]["version"] == 1
    assert ours["ledger"]["episodes"] == started.summary["episodes"] < 60
    if name == "ppo":
        torch.testing.assert_close(ours["torch_rng"], theirs["torch_rng"])
        line = json.loads((tmp_path / "started" / "metrics.jsonl").read_text())
        assert ours["algorithm"]["optimizer"]["state"][0]["step"] == line["num_gradient_steps"], (
            "it has counted no other"
        )
    else:
        assert ours["algorithm"]["real"]["ring"].total == started.summary["env_steps"]
        assert ours["algorithm"]["agent_pace"]["done"] == theirs["algorithm"]["agent_pace"]["done"]
    first = json.loads((tmp_path / "started" / "ledger.jsonl").read_text().splitlines()[0])
    assert first["update"] == 1
    assert first["segments"][0][0][0][0] == 0, "its first episode is number 0"


@pytest.mark.parametrize("name", RUNS)
def test_the_optimiser_comes_along_if_it_is_wanted_with_the_new_learning_rate(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    states = {}
    for kind in ("fresh", "taken"):
        again(name, runs, tmp_path / kind, learning_rate=0.01, init_optimizer=kind == "taken")
        states[kind] = optimizers(newest(tmp_path / kind)["algorithm"])
    theirs = optimizers(newest(runs[name])["algorithm"])
    for before, fresh, taken in zip(theirs, states["fresh"], states["taken"], strict=True):
        assert taken["state"][0]["step"] == fresh["state"][0]["step"] + before["state"][0]["step"]
        assert not torch.equal(taken["state"][0]["exp_avg"], fresh["state"][0]["exp_avg"])
        assert float(taken["param_groups"][0]["lr"]) == pytest.approx(0.01)
        assert float(before["param_groups"][0]["lr"]) == pytest.approx(3e-4)


def optimizers(state: dict[str, Any]) -> list[dict[str, Any]]:
    agent = state.get("agent", state)
    return [part for name, part in agent.items() if name.endswith("optimizer")]


def test_what_was_trained_with_sac_can_go_on_with_mbpo(runs: dict[str, Path], run_dir: Path) -> None:
    """Their agents are the same."""
    result = again("mbpo", runs, run_dir, init_from=runs["sac"], **NONE)
    np.testing.assert_array_equal(result.policy.weights, freerun.load_policy(runs["sac"]).weights)


def test_the_newest_checkpoint_is_used_or_the_one_that_is_named_and_said(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = checkpoint.names(runs["ppo"])
    again("ppo", runs, tmp_path / "one", quiet=False)
    newest_path = checkpoint.folder_of(runs["ppo"]) / names[-1]
    assert f"Starting from {newest_path}, score " in capsys.readouterr().err
    assert json.loads((tmp_path / "one" / "config.json").read_text())["init_from"] == str(newest_path)
    first = checkpoint.folder_of(runs["ppo"]) / names[0]
    named = again("ppo", runs, tmp_path / "two", init_from=first, **NONE)
    kept = freerun.load_policy(first).actor.arrays["0.weight"]
    np.testing.assert_array_equal(named.policy.actor.arrays["0.weight"], kept)


def test_such_a_run_can_be_resumed_and_replayed(runs: dict[str, Path], tmp_path: Path) -> None:
    """Also resumed when the other run is gone: it has started from there long ago."""
    other = tmp_path / "other"
    shutil.copytree(runs["ppo"], other)
    whole = again("ppo", runs, tmp_path / "whole", init_from=other, init_optimizer=True, total_steps=600)
    again("ppo", runs, tmp_path / "run", init_from=other, init_optimizer=True)
    assert main(["replay", str(tmp_path / "run")]) == 0
    shutil.rmtree(other)
    last = freerun.resume(tmp_path / "run", total_steps=600)
    np.testing.assert_array_equal(last.policy.weights, whole.policy.weights)
    with pytest.raises(UserError, match=r"--init-from .*cannot be used"):
        replay(tmp_path / "run")


def test_from_the_command_line_with_another_learning_rate(runs: dict[str, Path], run_dir: Path) -> None:
    """What --resume refuses and --config alone began from scratch."""
    words = ["train", "--config", str(runs["ppo"] / "config.json"), "--init-from", str(runs["ppo"]), "--seed", "3"]
    assert main([*words, "--learning-rate", "1e-30", "--total-steps", "200", "--run-dir", str(run_dir)]) == 0
    mine, theirs = (freerun.load_policy(path).actor.arrays["0.weight"] for path in (run_dir, runs["ppo"]))
    np.testing.assert_array_equal(mine, theirs)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "env", "changes", "message"),
    [
        ("ppo", "CartPole-v1", {"hidden_sizes": (16,)}, r"another network: give --hidden-sizes 8 as that run did"),
        ("ppo", "CartPole-v1", {"activation": "relu"}, r"another network: give --activation tanh"),
        ("ppo", "CartPole-v1", {"normalize_obs": False}, r"another network: give --normalize-obs as"),
        ("ppo", "CartPole-v1", {"network": "toy_networks:layered"}, r"another network: give no --network"),
        ("ppo", "Acrobot-v1", {}, r"is for observations in Box.*4.*and this environment's are in Box.*6"),
        ("ppo", "toy_envs:FourNumbers", {}, r"is for actions in Discrete\(2\), .* are in Discrete\(3\)"),
        ("ppo", "Pendulum-v1", {"algo": "sac"}, r"trained with --algo ppo, whose networks --algo sac cannot use"),
        ("sac", "Pendulum-v1", {"algo": "ppo"}, r"trained with --algo sac, whose networks --algo ppo cannot use"),
        ("sac", "Pendulum-v1", {"hidden_sizes": (8,)}, r"give --hidden-sizes 8 8"),
        ("sac", "toy_envs:StrongPendulum", {}, r"is for actions in Box\(-2.0, 2.0.* are in Box\(-3.0, 3.0"),
    ],
)
def test_what_does_not_fit_is_one_clear_sentence(
    name: str, env: str, changes: dict[str, Any], message: str, runs: dict[str, Path], run_dir: Path
) -> None:
    common = {"quiet": True, "mode": "sequential", "hidden_sizes": RUNS[name][1]["hidden_sizes"]}
    if "algo" not in changes:
        common |= {"algo": "sac"} if name == "sac" else {"normalize_obs": True}
    with pytest.raises(UserError, match=message):
        freerun.train(env, init_from=runs[name], run_dir=run_dir, **{**common, **changes})
    assert not run_dir.exists(), "a refused run leaves no folder"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--init-from", "nowhere"], "--init-from nowhere: there is no such folder"),
        (["--init-from", "."], "there is nothing to continue from in .: it has no checkpoint"),
        (["--init-from", "update-000000001"], "--init-from update-000000001 cannot be used: MANIFEST is missing"),
        (["--init-optimizer"], "--init-optimizer needs a run to take the optimiser from"),
    ],
)
def test_what_is_not_there_is_said(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartPole-v1", "-q", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_goes_on_cannot_start_anew(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(runs["ppo"]), "--init-from", str(runs["sac"])]) == 2
    assert "--init-from cannot change when a run is resumed" in capsys.readouterr().err
    assert main(["train", "--resume", str(runs["ppo"]), "--learning-rate", "0.5"]) == 2
    assert "start a new run from this one's policy with --config and --init-from" in capsys.readouterr().err


class Reticent:
    """An algorithm of somebody's own as it was before --init-from: it has all that it needs, and no more."""

    Config = PPOConfig

    def __init__(self, *settings: Any):
        self._inner = algorithms_ppo.PPO(*settings)
        self.policy = self._inner.policy

    def demand(self) -> Demand:
        return self._inner.demand()

    def observe(self, segments: Any) -> None:
        self._inner.observe(segments)

    def update(self, version: int, progress: float) -> Metrics:
        return self._inner.update(version, progress)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state)


def test_an_algorithm_that_does_not_say_what_it_has_learned_is_refused(runs: dict[str, Path], run_dir: Path) -> None:
    with pytest.raises(UserError, match="does not say which parts of its state are learned"):
        freerun.train("CartPole-v1", algo=Reticent, init_from=runs["ppo"], run_dir=run_dir, quiet=True)


# ---------------------------------------------------------------------------------------------- folders from elsewhere


def test_a_foreign_folder_gives_weights_and_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings name an environment, which nobody imports: the user has named one for the new run."""
    env_args = {"path": str(tmp_path / "seeds.txt")}
    small = {"mode": "sequential", "quiet": True, "total_episodes": 2, "episodes_per_update": 2, "hidden_sizes": (4,)}
    freerun.train("toy_envs:NotesItsSeeds", env_args=env_args, run_dir=tmp_path / "theirs", **small)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    (tmp_path / "seeds.txt").unlink()
    result = freerun.train(
        "toy_envs:OneBit", init_from=tmp_path / "theirs", run_dir=tmp_path / "ours", **{**small, **NONE}
    )
    np.testing.assert_array_equal(result.policy.weights, freerun.load_policy(tmp_path / "theirs").weights)
    assert not (tmp_path / "seeds.txt").exists()


@pytest.fixture
def folder(runs: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(runs["ppo"], tmp_path / "crafted")
    return tmp_path / "crafted"


def sign_again(path: Path) -> None:
    lines = []
    for line in (path / MANIFEST).read_text().splitlines():
        name = line.split("  ")[1]
        lines.append(f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n")
    (path / MANIFEST).write_text("".join(lines))


def test_a_damaged_checkpoint_is_not_used(folder: Path, runs: dict[str, Path], run_dir: Path) -> None:
    path = checkpoint.folder_of(folder) / checkpoint.names(folder)[-1]
    (path / "tensors.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="SHA-256 differs"):
        again("ppo", runs, run_dir, init_from=path)
    result = again("ppo", runs, run_dir, init_from=folder, **NONE)
    before = freerun.load_policy(checkpoint.folder_of(folder) / checkpoint.names(folder)[-2])
    np.testing.assert_array_equal(result.policy.actor.arrays["0.weight"], before.actor.arrays["0.weight"])


@pytest.mark.parametrize(
    "algorithm",
    [None, [], {}, {"net": None}, {"net": {}}, {"net": 3}, {"net": {"$items": [[[], 1]]}}],
)
def test_states_that_nobody_wrote_are_refused(
    algorithm: Any, folder: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in checkpoint.names(folder):
        path = checkpoint.folder_of(folder) / name
        state = json.loads((path / STATE).read_text())
        kept = state["algorithm"]
        state["algorithm"] = {**kept, **algorithm} if isinstance(algorithm, dict) and algorithm else algorithm
        (path / STATE).write_text(json.dumps(state))
        sign_again(path)
    words = ["train", "CartPole-v1", "--init-from", str(folder), "--normalize-obs", "--hidden-sizes", "8", "-q"]
    assert main([*words, "--run-dir", str(run_dir)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not run_dir.exists()


@pytest.mark.parametrize(("what", "message"), [("nan", "not finite"), ("shape", "of other networks")])
def test_numbers_that_would_do_harm_are_refused(
    what: str, message: str, folder: Path, runs: dict[str, Path], run_dir: Path
) -> None:
    """Moments of another shape would have Adam read beyond the end of an array."""
    from safetensors.numpy import load_file, save_file

    path = checkpoint.folder_of(folder) / checkpoint.names(folder)[-1]
    arrays = load_file(path / "tensors.safetensors")
    (name,) = [name for name in arrays if name.endswith("optimizer/state/0/exp_avg")]
    arrays[name] = arrays[name][:3].copy() if what == "shape" else np.full_like(arrays[name], np.nan)
    save_file(arrays, path / "tensors.safetensors")
    sign_again(path)
    with pytest.raises(UserError, match=message):
        again("ppo", runs, run_dir, init_from=path, init_optimizer=True)


# ---------------------------------------------------------------------------------------------- nothing left to do


def test_a_finished_run_says_that_nothing_is_left_and_how_to_go_on(
    run_dir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    freerun.train("CartPole-v1", run_dir=run_dir, **{**PPO, "total_steps": 200})
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", str(run_dir), "-q"]) == 0
    told = capsys.readouterr().out
    assert f"Nothing is left to do: the run in {run_dir} has made 2" in told
    assert "of 200 steps" in told
    assert "raise --total-steps" in told
    assert f"freerun train --config {run_dir / 'config.json'} --init-from {run_dir}" in told
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    result = freerun.resume(run_dir)
    assert "Nothing is left to do" in caplog.text
    assert result.summary["updates"] == 1
    assert main(["train", "--resume", str(run_dir), "--total-steps", "400", "-q"]) == 0
    assert "Finished" in capsys.readouterr().out
    assert main(["train", "--resume", str(run_dir), "--total-steps", "9999999", "--total-episodes", "2", "-q"]) == 0
    assert "of 2 episodes. To go on with it, raise --total-episodes" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["policy.safetensors", "summary.json"])
def test_a_run_that_was_killed_between_its_last_checkpoint_and_its_results_writes_them_when_it_is_resumed(
    lost: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    freerun.train("CartPole-v1", run_dir=run_dir, **{**PPO, "total_steps": 200})
    policy = (run_dir / "policy.safetensors").read_bytes()
    (run_dir / lost).unlink()
    assert main(["train", "--resume", str(run_dir), "-q"]) == 0
    assert "Finished" in capsys.readouterr().out
    assert (run_dir / "policy.safetensors").read_bytes() == policy
    assert (run_dir / "summary.json").exists()
