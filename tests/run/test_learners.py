"""Runs with several learners, as a person starts them: on one machine, with torchrun, and through Ray."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import preloaded_python
import psutil
import pytest
from leftovers import environment

import freerun
from freerun.core import EnvFailure, UserError, episode_seed
from freerun.run.learner_group import FollowerWatch
from freerun.run.replay_run import replay
from freerun.settings import defaults, registry
from freerun.settings.defaults import complete
from freerun.tools.cli.main import main
from freerun.transport import learner_place

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_servers")]

TESTS = Path(__file__).parent
SMALL: dict[str, Any] = {"total_steps": 700, "quiet": True, "seed": 4, "deterministic": True, "hidden_sizes": (8,)}
# Learners exchange gradients at every gradient step, so a few of them show as much as many.
OFF_POLICY: dict[str, Any] = {"steps_per_update": 100, "learning_starts": 200, "updates_per_step": 0.2}
OFF_POLICY |= {"total_steps": 800}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": (
        "CartPole-v1",
        {"steps_per_update": 150, "num_epochs": 2, "normalize_obs": True, "normalize_reward": True},
    ),
    "sac": ("Pendulum-v1", {**OFF_POLICY, "batch_size": 17}),
    "fastsac": ("Pendulum-v1", {**OFF_POLICY, "batch_size": 18}),
    "dqn": ("CartPole-v1", {**OFF_POLICY, "batch_size": 17}),
    "mbpo": (
        "Pendulum-v1",
        {
            **OFF_POLICY,
            "model_hidden_sizes": (8,),
            "num_models": 3,
            "num_elites": 2,
            "rollouts_per_step": 3.0,
            "model_updates_per_step": 0.2,
            "batch_size": 16,
        },
    ),
}
LONG = ("--total-episodes", "1000000", "--episodes-per-update", "8", "--num-epochs", "1", "--num-workers", "3")


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trained(run: Path) -> list[list[tuple[int, int, int]]]:
    """By update: episode, steps, version, in the order in which they were learned from."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [[tuple(piece) for segment in line["segments"] for column in segment for piece in column] for line in lines]


@pytest.mark.parametrize("algo", registry.ALGORITHMS)
def test_two_learners_train_as_one_does(algo: str, tmp_path: Path) -> None:
    env, options = RUNS[algo]
    results = []
    for count in (1, 2):
        settings = {**SMALL, **options, "algo": algo, "num_workers": 3, "num_learners": count}
        results.append(freerun.train(env, **settings, run_dir=tmp_path / str(count)))
    one, two = results
    np.testing.assert_allclose(two.policy.weights, one.policy.weights, rtol=1e-3, atol=1e-5)
    assert one.summary["updates"] > 2
    for name in ("env_steps", "episodes", "updates", "num_workers", "mean_return"):
        assert two.summary[name] == pytest.approx(one.summary[name]), name
    assert two.summary["ledger"] == one.summary["ledger"]
    assert trained(two.run_dir) == trained(one.run_dir)
    for mine, theirs in zip(records(one.run_dir), records(two.run_dir), strict=True):
        assert theirs["return_mean"] == pytest.approx(mine["return_mean"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    with pytest.raises(UserError, match="several learners cannot be replayed"):
        replay(two.run_dir)
    assert not [child for child in multiprocessing.active_children() if "learner" in child.name]


def test_a_run_goes_on_with_several_learners(tmp_path: Path) -> None:
    env, options = RUNS["ppo"]
    settings = {**SMALL, **options, "num_workers": 3}
    one = freerun.train(env, **settings, run_dir=tmp_path / "one")
    # After an update, so that the run which ends there has not had a smaller last one.
    half = next(int(record["step"]) for record in records(tmp_path / "one") if 2 * record["progress"] > 1)
    freerun.train(env, **{**settings, "num_learners": 2, "total_steps": half}, run_dir=tmp_path / "two")
    two = freerun.resume(tmp_path / "two", total_steps=settings["total_steps"], num_learners=3)
    np.testing.assert_allclose(two.policy.weights, one.policy.weights, rtol=1e-3, atol=1e-5)
    assert two.summary["ledger"] == one.summary["ledger"]
    assert trained(tmp_path / "two") == trained(tmp_path / "one")


def followers(first: psutil.Process) -> list[psutil.Process]:
    return [child for child in first.children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("freerun", {"num_workers": 2, "segment_steps": 20, "steps_per_update": 200}),
        ("sync", {"num_workers": 2, "episodes_per_update": 5}),
        ("continuous", {"num_collectors": 1, "num_envs": 2, "collection_batch_size": 50, "steps_per_update": 100}),
    ],
)
def test_the_books_of_all_balance_whatever_is_handed_over(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SMALL, "deterministic": False, **options, "mode": mode, "num_learners": 2, "num_epochs": 1}
    result = freerun.train("CartPole-v1", **settings, run_dir=tmp_path / "run")
    summary = result.summary
    assert summary["outcome"] == "finished"
    assert summary["env_steps"] >= 700
    assert sum(summary["ledger"]["steps_by_version"].values()) == summary["env_steps"]
    pieces = [piece for pieces in trained(tmp_path / "run") for piece in pieces]
    assert sum(num_steps for _, num_steps, _ in pieces) == summary["env_steps"]
    assert {number % 2 for number, _, _ in pieces if number >= 0} == {0, 1}  # both have brought some


def test_torchrun_starts_them_too(run_dir: Path) -> None:
    words = ("train", "CartPole-v1", "--total-episodes", "24", "--episodes-per-update", "8", "--num-workers", "2")
    alone = run_dir.with_name("alone")
    assert main([*words, "--deterministic", "-q", "--run-dir", str(alone)]) == 0
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", "freerun", *words, "--deterministic", "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("24 episodes, 3 updates") == 1
    assert done.stderr.count("freerun · CartPole-v1 · ppo · freerun × 2 · seed 0") == 1
    assert json.loads((run_dir / "summary.json").read_text())["num_learners"] == 2
    one, two = (freerun.load_policy(path).weights for path in (alone, run_dir))
    np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("ray_nodes")
def test_ray_starts_them_too(tmp_path: Path) -> None:
    settings = {**SMALL, "total_steps": None, "total_episodes": 24, "episodes_per_update": 8, "mode": "ray"}
    results = []
    for count in (1, 2):
        more = {"num_learners": count, "num_workers": 2, "run_dir": tmp_path / str(count)}
        results.append(freerun.train("CartPole-v1", **settings, **more))
    np.testing.assert_allclose(results[1].policy.weights, results[0].policy.weights, rtol=1e-3, atol=1e-5)
    assert results[1].summary["ledger"] == results[0].summary["ledger"]


# ---------------------------------------------------------------------------------------------- how they end


class SlowFollowers:
    """Followers that note whether two threads use them at the same time."""

    def __init__(self) -> None:
        self.looking = threading.Event()
        self.being_used = False
        self.used_twice_at_once = False
        self.is_closed = False

    def ended(self) -> list[tuple[int, Exception | None]]:
        self._use()
        return []

    def close(self, at_once: bool) -> None:
        self._use()
        self.is_closed = True

    def _use(self) -> None:
        self.used_twice_at_once |= self.being_used
        self.being_used = True
        self.looking.set()
        time.sleep(0.1)
        self.being_used = False


def test_followers_are_closed_when_nobody_looks_at_them_any_more() -> None:
    """A follower that ended while its group was being closed changed a dictionary under a loop over it."""
    slow = SlowFollowers()
    with FollowerWatch(slow):
        assert slow.looking.wait(10)
    assert slow.is_closed
    assert not slow.used_twice_at_once


def start(run_dir: Path, num_learners: int, *words: str) -> preloaded_python.Process:
    words = ("train", "CartPole-v1", *LONG, "--num-learners", str(num_learners), "--run-dir", str(run_dir), *words)
    return preloaded_python.Process(
        ["-m", "freerun", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )


def wait_for_updates(run_dir: Path, process: preloaded_python.Process) -> list[psutil.Process]:
    """All processes of the run, once it has come to an update."""
    deadline = time.monotonic() + 80
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return psutil.Process(process.pid).children(recursive=True)


def end_of(process: preloaded_python.Process, family: list[psutil.Process]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left
    return process.wait(), out, err


def test_a_learner_that_is_killed_ends_the_run_with_a_word(run_dir: Path) -> None:
    process = start(run_dir, 3)  # one is killed, and there is another besides the first
    family = wait_for_updates(run_dir, process)
    followers(psutil.Process(process.pid))[-1].send_signal(signal.SIGKILL)
    code, _, err = end_of(process, family)
    assert code == 1
    assert "freerun: learner " in err
    assert "its process was killed (SIGKILL)" in err
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"
    assert (run_dir / "policy.safetensors").exists()  # what was learned until then


def test_the_others_end_when_the_first_is_killed(run_dir: Path) -> None:
    process = start(run_dir, 2)
    family = wait_for_updates(run_dir, process)
    process.kill()
    assert end_of(process, family)[0] == -signal.SIGKILL


def test_an_interrupted_run_ends_everywhere_and_keeps_what_was_learned(run_dir: Path) -> None:
    process = start(run_dir, 2, "-q")
    family = wait_for_updates(run_dir, process)
    process.send_signal(signal.SIGINT)
    code, out, err = end_of(process, family)
    assert code == 130, err
    assert out.startswith("Interrupted")
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "interrupted"
    assert (run_dir / "policy.safetensors").exists()


def test_a_failure_of_one_learners_environment_is_told_as_it_is(run_dir: Path) -> None:
    """Episode 11 is played by the second of two, because it is odd."""
    seed = episode_seed(7, 11)
    with pytest.raises(EnvFailure, match=r"learner 1: [\s\S]*the simulator fell over") as caught:
        freerun.train(
            "toy_envs:FailsInEpisode",
            env_args={"seed": seed},
            seed=7,
            num_learners=2,
            num_workers=2,
            total_episodes=1000,
            episodes_per_update=6,
            quiet=True,
            run_dir=run_dir,
        )
    assert "ZeroDivisionError" in str(caught.value)
    assert str(seed) in str(caught.value)


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("CartPole-v1", "--num-learners", "3", "--num-workers", "2"), "raise --num-workers"),
        (("CartPole-v1", "--num-learners", "0"), "--num-learners must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    text = capsys.readouterr().err
    assert advice in text
    assert text.count("\n") == 1


def test_several_learners_take_the_stages_in_turn_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"env": "Pendulum-v1", "algo": "mbpo", "num_learners": 2}
    for stages in ("auto", "concurrent"):
        caplog.clear()
        config = complete(registry.make_config({**settings, "stages": stages}))
        assert config.algorithm.stages == "in-turn"
        assert [record.message for record in caplog.records] == [
            "several learners take the stages of the algorithm in turn (--stages in-turn)"
        ]
    caplog.clear()
    complete(registry.make_config({**settings, "stages": "in-turn"}))
    assert not caplog.records


def test_torchruns_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    config = registry.make_config({"env": "CartPole-v1", "num_learners": 2})
    with pytest.raises(UserError, match="torchrun has started 4 learners"):
        defaults.num_learners(config)
    assert defaults.default_num_workers() == max(4, 2 * (os.cpu_count() or 1))
    assert not learner_place.is_first()
