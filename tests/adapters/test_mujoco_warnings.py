"""What MuJoCo says about a model is logged once in a run, however many environments compile the model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mujoco
import pytest

from freerun.adapters import mujoco_warnings
from freerun.adapters.gymnasium_envs import GymnasiumFactory

ENV = "HalfCheetah-v5"
WORD = "settotalmass"
"""MuJoCo 3.17, which constraints.txt pins, calls this attribute of Gymnasium's HalfCheetah deprecated."""


@pytest.fixture
def unset_warning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = mujoco.get_mju_user_warning()
    monkeypatch.setattr(mujoco_warnings, "LOGGED", set())
    mujoco.set_mju_user_warning(None)
    yield
    mujoco.set_mju_user_warning(before)


def test_a_run_with_many_environments_says_it_once(tmp_path: Path) -> None:
    flags = ["--num-workers", "2", "--envs-per-worker", "4", "--total-steps", "200", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "freerun", "train", ENV, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert (done.stdout + done.stderr).count(WORD) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}, "MuJoCo has written its log beside the run"


def test_another_process_does_not_say_it_again(unset_warning: None, caplog: pytest.LogCaptureFixture) -> None:
    factory = GymnasiumFactory(ENV)
    assert [WORD in message for message in caplog.messages] == [True]
    caplog.clear()
    mujoco_warnings.LOGGED.clear()  # as in a worker, which has started as a process of its own
    factory.make(2).close()
    assert caplog.messages == []


def test_a_function_of_the_users_own_stays(unset_warning: None, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    mujoco.set_mju_user_warning(heard.append)
    GymnasiumFactory(ENV)
    assert [WORD in text for text in heard] == [True]
    assert caplog.messages == []
