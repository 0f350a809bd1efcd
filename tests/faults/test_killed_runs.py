"""Runs that are killed, stopped or out of room on the disk: `scripts/chaos_resume.py` in short, and the rest of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import preloaded_python
import psutil
import pytest

import freerun
from freerun.core import UserError
from freerun.persistence import checkpoint, files
from freerun.tools.cli.main import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
LONG = ["CartPole-v1", "--total-steps", "100000000", "--steps-per-update", "256", "--num-epochs", "1", "-q"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("algo", "num_kills", "total_steps"), [("ppo", 2, 10_000), ("sac", 1, 2_500)])
def test_killed_and_resumed_it_ends_where_it_would_have(
    algo: str, num_kills: int, total_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import chaos_resume

    monkeypatch.setattr(chaos_resume, "freerun", RunWithLog)
    found = chaos_resume.chaos(algo, num_kills, total_steps, 1.0, seed=1, folder=tmp_path)
    assert found["kills"] == num_kills


class RunWithLog(preloaded_python.Process):
    """What `chaos_resume` starts and kills: as its own way of starting a run, but preloaded."""

    def __init__(self, words: list[str], log: Path):
        with log.open("ab") as file:
            super().__init__(["-m", "freerun", "train", *words], stdout=file, stderr=file)

    def children(self, recursive: bool) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive)


def started(run_dir: Path, *words: str) -> preloaded_python.Process:
    command = ["-m", "freerun", "train", *LONG, "--run-dir", str(run_dir), *words]
    return preloaded_python.Process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for_updates(run_dir: Path, process: preloaded_python.Process, num: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= num):
        assert time.monotonic() < deadline, "no update within a minute"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_keeps_everything_first(number: signal.Signals, run_dir: Path) -> None:
    process = started(run_dir, "--mode", "pipes", "--num-workers", "2", "--checkpoint-every", "never")
    wait_for_updates(run_dir, process, 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    updates = json.loads((run_dir / "summary.json").read_text())["updates"]
    found = checkpoint.newest(run_dir)
    assert found.state["update"] == updates
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == updates
    steps = found.state["ledger"]["steps"]
    assert main(["train", "--resume", str(run_dir), "--total-steps", str(steps + 300), "-q"]) == 0
    assert json.loads((run_dir / "summary.json").read_text())["env_steps"] >= steps + 300


def test_two_cannot_resume_the_same_run_at_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started(run_dir, "--mode", "sequential")
    wait_for_updates(run_dir, process, 1)
    assert main(["train", "--resume", str(run_dir)]) == 2
    assert "is still going on" in capsys.readouterr().err
    process.kill()
    process.communicate()


def test_damaged_checkpoints_are_refused_and_the_one_before_is_used(tmp_path: Path) -> None:
    from chaos_disk import SMALL_SAC, damage

    assert damage([*SMALL_SAC, "--total-steps", "600"], tmp_path, num_bits=200, every=5000) > 200


@pytest.mark.timeout(300)
def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    from chaos_disk import full_disk, has_namespaces

    if not has_namespaces():
        pytest.skip("a small disk cannot be had here: unshare --mount is not allowed")
    assert "No space left on device" in full_disk(tmp_path, 300, 64, 10_000)


def test_lines_wait_for_room_and_none_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = files.LineFile(tmp_path / "lines")
    lines.write("first\n")
    really = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: really(descriptor, content[:3]))
    lines.write("second\n")  # in pieces, as a system may
    room = [4]

    def full(descriptor: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = min(room[0], len(content))
        room[0] -= taken
        return really(descriptor, content[:taken])

    monkeypatch.setattr(os, "write", full)
    lines.write("third\n")
    assert (tmp_path / "lines").read_text() == "first\nsecond\n"
    with pytest.raises(OSError, match="No space"):
        lines.mark()
    monkeypatch.setattr(os, "write", really)
    lines.write("fourth\n")
    mark = lines.mark()
    lines.write("fifth\n")
    lines.close()
    again = files.LineFile(tmp_path / "lines", mark)
    assert again.mark() == mark
    again.close()
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\nfourth\n"


def test_weights_that_are_not_finite_are_never_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from freerun.algorithms.ppo.ppo import PPO

    update = PPO.update

    def spoilt(self: PPO, version: int, progress: float) -> Any:
        metrics = update(self, version, progress)
        if version >= 2:
            self.policy.weights[:] = float("nan")
        return metrics

    monkeypatch.setattr(PPO, "update", spoilt)
    settings = {"total_episodes": 40, "episodes_per_update": 10, "num_epochs": 1, "checkpoint_every": "1"}
    with pytest.raises(UserError, match="not finite"):
        freerun.train("CartPole-v1", mode="sequential", quiet=True, run_dir=run_dir, **settings)
    assert checkpoint.newest(run_dir).state["update"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning-rate", "0.5"], "--learning-rate cannot change when a run is resumed (it was 0.0003)"),
        (["--seed", "9"], "--seed cannot change"),
        (["--preset", "defender"], "leave --config and --preset out"),
        (["--mode", "batch", "--num-workers", "3", "--total-episodes", "8"], "needs whole episodes"),
    ],
)
def test_what_cannot_be_resumed_is_one_clear_sentence(
    words: list[str], message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--total-episodes", "4", "--episodes-per-update", "2", "-q", "--mode", "sequential"]
    assert main(["train", "CartPole-v1", "--run-dir", str(run_dir), *quick]) == 0
    assert main(["train", "--resume", str(run_dir), *words]) == 2
    assert message in capsys.readouterr().err
    assert main(["train", "--resume", str(run_dir / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_eval_takes_checkpoints(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"total_episodes": 60, "episodes_per_update": 20, "num_epochs": 1, "checkpoint_every": "1"}
    freerun.train("CartPole-v1", mode="sequential", quiet=True, run_dir=run_dir, **settings)
    (run_dir / "policy.safetensors").unlink()  # as if it had been killed
    for words in ([str(run_dir)], [str(run_dir), "--checkpoint", "best"], [str(run_dir), "--checkpoint", "newest"],
                  [str(run_dir / "checkpoints" / "update-000000002")],
                  [str(run_dir), "--checkpoint", "update-000000003"]):  # fmt: skip
        assert main(["eval", *words, "--episodes", "1"]) == 0, words
    capsys.readouterr()
    assert main(["eval", str(run_dir), "--checkpoint", "../../x"]) == 2
    assert "is best, newest or a name" in capsys.readouterr().err
    assert freerun.load_policy(run_dir, checkpoint="best").weights.size
