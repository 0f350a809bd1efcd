"""What every tracker must do; a new line in the registry is tested here by itself. All of them are real."""

from __future__ import annotations

import inspect
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import preloaded_python
import pytest

import freerun
from freerun.core import MetricSink, UserError
from freerun.settings import registry
from freerun.telemetry.tracking import BackgroundSink, TrackedRun, TrackingConfig

RECORD = {
    "update": 5,
    "return_mean": 3.5,
    "length_mean": float("nan"),
    "steps_per_second": 100.0,
    "interval_seconds": 0.5,
    "learner_waiting_share": 0.25,
    "learner_updating_share": 0.75,
    "policy_loss": 0.125,
    "lag_share/0": 0.75,
    "lag_share/1": 0.25,
    "queue_percent": 60.0,
}
CONFIG = {"env": "CartPole-v1", "algo": "ppo", "mode": "freerun", "seed": 3}


def made(name: str, path: Path, **options: Any) -> Any:
    tracking = TrackingConfig(prometheus_port=0, wandb_mode="offline", **options)
    return registry.TRACKERS[name].load()(TrackedRun(path, CONFIG, tracking))


def test_an_unknown_tracker_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(UserError, match="there is no tracker 'wandbb': did you mean wandb"):
        registry.make_config({"env": "CartPole-v1", "track": ("wandbb",)})


@pytest.mark.parametrize("name", registry.TRACKERS)
def test_its_help_names_it(name: str) -> None:
    assert name in inspect.getsource(TrackingConfig)


@pytest.mark.parametrize("name", registry.TRACKERS)
def test_it_takes_records_and_closes(name: str, tmp_path: Path) -> None:
    tracker: MetricSink = made(name, tmp_path)
    for step in (100, 200):
        tracker.write(step, RECORD)
    tracker.close()


@pytest.mark.parametrize("name", registry.TRACKERS)
def test_a_missing_package_is_told_in_one_sentence(name: str, run_dir: Path) -> None:
    package = registry.TRACKERS[name].traits.package
    assert package is not None
    hide = f"import sys; sys.modules['{package.module}'] = None"
    words = ["train", "CartPole-v1", "--track", name, "--run-dir", str(run_dir)]
    command = f"{hide}; from freerun.tools.cli.main import main; main({words})"
    done = preloaded_python.run("-c", command)
    assert f"--track {name} needs" in done.stderr.splitlines()[-1]
    assert f"pip install 'freerun[{name}]'" in done.stderr.splitlines()[-1]
    assert not run_dir.exists()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = made("tensorboard", tmp_path)
    tracker.write(100, RECORD)
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (scalar,) = events.Scalars("Train/mean_reward")
    assert (scalar.step, scalar.value) == (100, 3.5)
    assert "Train/mean_episode_length" not in events.Tags()["scalars"]  # not a number yet
    assert "config/text_summary" in events.Tags()["tensors"]


def test_wandb_keeps_an_offline_run_in_a_group_with_its_mode(tmp_path: Path) -> None:
    import wandb

    tracker = made("wandb", tmp_path)
    assert wandb.run is not None
    assert (wandb.run.group, wandb.run.job_type) == ("CartPole-v1 ppo", "freerun")
    tracker.write(100, RECORD)
    tracker.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while b"Train/mean_reward" not in (content := file.read_bytes()):  # W&B's own process writes it in its own time
        assert time.monotonic() < deadline, content
        time.sleep(0.1)
    assert b"CartPole-v1 ppo" in content


def test_wandb_without_an_account_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    run = TrackedRun(tmp_path, CONFIG, TrackingConfig(wandb_mode="online"))
    with pytest.raises(UserError, match=r"wandb login.*offline"):
        registry.TRACKERS["wandb"].load()(run)


def test_prometheus_answers_with_the_newest_record(tmp_path: Path) -> None:
    tracker = made("prometheus", tmp_path)
    tracker.write(100, {"return_mean": 1.0})
    tracker.write(200, RECORD)
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    labels = 'algo="ppo",env="CartPole-v1",mode="freerun",seed="3"'
    assert f"freerun_return_mean{{{labels}}} 3.5" in lines
    assert f"freerun_env_steps{{{labels}}} 200.0" in lines
    assert 'freerun_lag_share{algo="ppo",env="CartPole-v1",lag="1",mode="freerun",seed="3"} 0.25' in lines
    assert not [line for line in lines if "length_mean" in line]
    with pytest.raises(UserError, match="choose another --prometheus-port"):
        registry.TRACKERS["prometheus"].load()(
            TrackedRun(tmp_path, CONFIG, TrackingConfig(prometheus_port=tracker.port))
        )
    tracker.close()


def test_a_run_is_tracked(run_dir: Path) -> None:
    settings: dict[str, Any] = {"total_steps": 500, "steps_per_update": 250, "num_workers": 1, "quiet": True}
    freerun.train("CartPole-v1", run_dir=run_dir, track=("tensorboard", "tensorboard"), **settings)
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1


def test_a_tracker_that_cannot_start_leaves_no_run_behind(run_dir: Path, tmp_path: Path) -> None:
    taken = made("prometheus", tmp_path)
    settings: dict[str, Any] = {"total_steps": 500, "num_workers": 1, "quiet": True, "track": ("prometheus",)}
    with pytest.raises(UserError, match="prometheus-port"):
        freerun.train("CartPole-v1", run_dir=run_dir, prometheus_port=taken.port, **settings)
    taken.close()
    assert not (run_dir / "config.json").exists()


class Kept:
    """A sink that keeps, and fails at the third record."""

    def __init__(self) -> None:
        self.records: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            raise OSError("disk full")
        self.records.append((step, metrics))

    def close(self) -> None:
        self.closed = True


def test_records_pass_through_the_background_in_order() -> None:
    kept = Kept()
    background = BackgroundSink(cast(MetricSink, kept))
    background.write(1, {"a": 1.0})
    background.write(2, {"a": 2.0})
    background.close()
    assert kept.records == [(1, {"a": 1.0}), (2, {"a": 2.0})]
    assert kept.closed


def test_what_a_sink_raises_in_the_background_is_not_lost() -> None:
    kept = Kept()
    background = BackgroundSink(cast(MetricSink, kept))
    background.write(3, {})
    with pytest.raises(OSError, match="disk full"):
        background.close()
    assert kept.closed
