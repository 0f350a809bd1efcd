"""Workers that die, hang, stop or raise: told of, started again, and the episode run again with the same result."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from worker_processes import workers

import freerun
from freerun.core import EnvFailure, UserError

MODES = ["pipes", "executor", "freerun", "ray"]
SUPERVISED = ["sync", *MODES]
SETTINGS: dict[str, Any] = {
    "total_episodes": 60,
    "episodes_per_update": 20,
    "num_epochs": 1,
    "deterministic": True,
    "quiet": True,
}
KINDS = {"die": "death", "segfault": "death", "hang": "hang", "stop": "hang", "raise": "error"}
WORDS = {"die": "died", "segfault": "SIGSEGV", "hang": "stuck_for_ever", "stop": "stopped by a signal"}
WORDS["raise"] = "ZeroDivisionError: the simulator fell over"


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "incidents.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> freerun.Result:
    folder = tmp_path_factory.mktemp("reference")
    env_args = {"path": str(folder / "mark"), "how": "never"}
    return freerun.train("toy_envs:FailsOnce", mode="sequential", env_args=env_args, run_dir=folder / "run", **SETTINGS)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("mode", SUPERVISED)
def test_a_worker_that_fails_costs_nothing_but_time(
    mode: str, how: str, reference: freerun.Result, tmp_path: Path
) -> None:
    mark = tmp_path / "failed"
    result = freerun.train(
        "toy_envs:FailsOnce",
        mode=mode,
        num_workers=3,
        env_args={"path": str(mark), "how": how},
        run_dir=tmp_path / "run",
        step_timeout=2.0,
        **SETTINGS,
    )
    assert mark.exists(), "nobody failed"
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)
    assert result.summary["worker_restarts"] == 1
    ledger = result.summary["ledger"]
    assert ledger["rerun"] >= 1
    assert ledger["started"] == ledger["trained"] == 60
    (incident,) = incidents(tmp_path / "run")
    assert incident["kind"] == KINDS[how]
    if (mode, how) != ("ray", "segfault"):  # whose exit code is lost
        assert WORDS[how] in incident["text"]


def test_an_environment_in_this_process_that_raises_is_built_anew(reference: freerun.Result, tmp_path: Path) -> None:
    env_args = {"path": str(tmp_path / "failed"), "how": "raise"}
    result = freerun.train(
        "toy_envs:FailsOnce", mode="sequential", env_args=env_args, run_dir=tmp_path / "run", **SETTINGS
    )
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)
    assert [incident["kind"] for incident in incidents(tmp_path / "run")] == ["error"]


def test_a_learner_that_is_stuck_in_an_environment_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import toy_envs

    monkeypatch.setattr(toy_envs, "stuck_for_ever", lambda: time.sleep(1.5))
    env_args = {"path": str(tmp_path / "failed"), "how": "hang"}
    freerun.train(
        "toy_envs:FailsOnce",
        mode="sequential",
        env_args=env_args,
        step_timeout=0.5,
        run_dir=tmp_path / "run",
        **SETTINGS,
    )
    assert any("toy_envs.py" in record.getMessage() for record in caplog.records if record.name == "freerun")


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("mode", SUPERVISED)
def test_workers_that_die_each_time_end_the_run_with_a_word(mode: str, tmp_path: Path) -> None:
    with pytest.raises(EnvFailure, match=r"the run ends, for .* failed \d times[\s\S]*died"):
        freerun.train(
            "toy_envs:Broken", mode=mode, num_workers=2, env_args={"how": "die"}, run_dir=tmp_path / "run", **SETTINGS
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert summary["incidents"]["death"] >= 3


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("mode", ["sequential", *SUPERVISED])
def test_an_episode_that_fails_each_time_ends_the_run_with_its_own_error(mode: str, tmp_path: Path) -> None:
    """Other workers get theirs done meanwhile; but this one cannot be left out."""
    with pytest.raises(EnvFailure, match=r"failed 3 times[\s\S]*with seed \d+[\s\S]*ZeroDivisionError"):
        freerun.train(
            "toy_envs:Faulty",
            mode=mode,
            num_workers=1 if mode == "sequential" else 3,
            env_args={"how": "raise", "share": 0.02},
            run_dir=tmp_path / "run",
            **{**SETTINGS, "total_episodes": 1000},
        )


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("mode", ["pipes", "continuous"])
def test_a_used_up_budget_of_failures_ends_the_run_with_a_summary(mode: str, tmp_path: Path) -> None:
    """Each episode of some share fails, but training goes on in between."""
    settings: dict[str, Any] = {"mode": mode, "num_workers": 2, "episodes_per_update": 20, "total_episodes": 10_000}
    if mode == "continuous":
        del settings["num_workers"], settings["episodes_per_update"]
        settings |= {"num_collectors": 2, "num_envs": 2, "collection_batch_size": 8, "collector_kind": "process"}
    how = "die-at-random" if mode == "pipes" else "raise"
    with pytest.raises(EnvFailure, match=r"workers failed 6 times \(6 × \w+\), and --max-failures is 5"):
        freerun.train(
            "toy_envs:Faulty",
            env_args={"how": how, "share": 0.05},
            max_failures=5,
            num_epochs=1,
            quiet=True,
            run_dir=tmp_path / "run",
            **settings,
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert "--max-failures is 5" in summary["error"]
    assert summary["episodes"] > 0
    assert (tmp_path / "run" / "policy.safetensors").exists()


def test_a_thread_that_hangs_is_left_behind(tmp_path: Path) -> None:
    result = freerun.train(
        "toy_envs:FailsOnce",
        mode="continuous",
        collector_kind="thread",
        num_collectors=2,
        num_envs=2,
        collection_batch_size=8,
        env_args={"path": str(tmp_path / "failed"), "how": "hang", "step_seconds": 0.001},
        step_timeout=1.0,
        total_steps=3000,
        steps_per_update=64,
        num_epochs=1,
        quiet=True,
        run_dir=tmp_path / "run",
    )
    assert result.summary["worker_restarts"] == 1
    (incident,) = incidents(tmp_path / "run")
    assert incident["kind"] == "hang"
    assert "stuck_for_ever" in incident["text"]


@pytest.mark.parametrize("value", [{"step_timeout": 0.0}, {"max_failures": -1}])
def test_what_makes_no_sense_is_refused(value: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(value)).replace('_', '-')} must be"):
        freerun.train("toy_envs:Audit", run_dir=tmp_path / "run", **value)


@pytest.mark.parametrize("mode", MODES)
def test_workers_killed_from_outside_at_random_moments(mode: str, tmp_path: Path) -> None:
    stop = threading.Event()
    killed: list[int] = []

    def kill_now_and_then() -> None:
        rng = np.random.default_rng(0)
        while not stop.wait(0.9) and len(killed) < 3:
            at_work = sorted(pid for pid in workers() if _has_lived(pid))
            if at_work:
                pid = at_work[int(rng.integers(len(at_work)))]
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        result = freerun.train(
            "toy_envs:Audit",
            mode=mode,
            num_workers=4,
            max_lag=1,
            env_args={"step_seconds": 0.002},
            total_episodes=60,
            episodes_per_update=20,
            num_epochs=1,
            quiet=True,
            run_dir=tmp_path / "run",
        )
    finally:
        stop.set()
        killer.join()
    assert killed, "nobody was killed"
    assert result.summary["ledger"]["trained"] == 60
    assert result.summary["worker_restarts"] >= 1


def _has_lived(pid: int) -> bool:
    """Long enough to be at work."""
    try:
        return time.time() - psutil.Process(pid).create_time() > 0.2
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("mode", ["pipes", "executor"])
def test_a_worker_killed_in_the_middle_of_a_message(mode: str, tmp_path: Path) -> None:
    """Half of an episode has arrived: it is thrown away, and the episode is run again."""
    mark = tmp_path / "killed"
    settings = {**SETTINGS, "total_episodes": 12, "episodes_per_update": 6}
    result = freerun.train(
        "toy_envs:KilledWhileItSends",
        mode=mode,
        num_workers=2,
        env_args={"path": str(mark)},
        run_dir=tmp_path / "run",
        hidden_sizes=(2,),
        **settings,
    )
    assert mark.exists(), "nobody was to be killed"
    assert result.summary["ledger"]["trained"] == 12
    assert [incident["kind"] for incident in incidents(tmp_path / "run")] == ["death"]


@pytest.mark.parametrize("mode", ["sync", "pipes", "executor", "freerun"])
def test_a_worker_stopped_as_it_builds_its_environment(mode: str, tmp_path: Path) -> None:
    result = freerun.train(
        "toy_envs:StoppedAsItIsBuilt",
        mode=mode,
        num_workers=2,
        env_args={"path": str(tmp_path / "stopped")},
        run_dir=tmp_path / "run",
        step_timeout=1.0,
        **SETTINGS,
    )
    assert (tmp_path / "stopped").exists()
    assert result.summary["ledger"]["trained"] == 60
    assert [incident["kind"] for incident in incidents(tmp_path / "run")] == ["hang"]


def test_the_death_of_the_last_process_to_start_is_noticed(run_dir: Path) -> None:
    """Python's pool watches a process only from the next task on: the others would have waited for it for a minute."""
    before = workers()

    def kill_the_last() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            new = workers() - before
            if len(new) == 4:
                os.kill(max(new), signal.SIGKILL)
                return

    killer = threading.Thread(target=kill_the_last)
    killer.start()
    summary = freerun.train("toy_envs:SlowToBuild", mode="executor", num_workers=4, run_dir=run_dir, **SETTINGS).summary
    killer.join()
    assert summary["worker_restarts"] >= 1
    assert summary["startup_seconds"] < 30


def test_a_pool_that_breaks_while_it_starts_is_started_again(run_dir: Path) -> None:
    """Python's pool then starts the next process with a pipe that it has closed, and says only that."""
    before = workers()

    def kill_the_first() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            new = workers() - before
            if len(new) >= 2:
                os.kill(min(new), signal.SIGKILL)
                return

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    summary = freerun.train(
        "toy_envs:SlowToBuild", mode="executor", num_workers=12, run_dir=run_dir, **SETTINGS
    ).summary
    killer.join()
    assert summary["worker_restarts"] >= 1
