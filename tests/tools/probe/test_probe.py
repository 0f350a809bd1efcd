"""Real probes of small environments: what is measured, what is said, what is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import EnvFailure, UserError, WorkerDied, WorkerHung
from freerun.settings.factories import env_recipe, make_algorithm
from freerun.settings.registry import MODES, make_config
from freerun.tools.cli.main import main
from freerun.tools.probe import auto_mode, measure, measurement, probe_cache, update_costs
from freerun.tools.probe.auto_mode import Probe
from freerun.tools.probe.candidates import Search
from freerun.tools.probe.env_trial import EnvTrial, core_use
from freerun.tools.probe.forecast import Forecast
from freerun.tools.probe.measurement import Measurement
from freerun.tools.probe.probe_report import findings

pytestmark = pytest.mark.slow

LIGHT: dict[str, Any] = {"num_epochs": 1, "minibatch_size": 2048, "hidden_sizes": (16,)}
"""Updates that take no time."""
LIGHT_FLAGS = ["--num-epochs", "1", "--minibatch-size", "2048", "--hidden-sizes", "16"]
SLEEPING = {"short": 10, "long": 10, "step_seconds": 0.02}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and shorter looks: what is tested is not how exact they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, seconds in (("PLAY_SECONDS", 0.4), ("RACE_SECONDS", 0.1), ("MODE_SECONDS", 0.1), ("UPDATE_SECONDS", 0.1)):
        monkeypatch.setattr(measure, name, seconds)
    monkeypatch.setattr(measure, "LONGEST_VECTOR_SECONDS", 0.5)
    monkeypatch.setattr(update_costs, "MOST_TIMED_STEPS", 1024)
    monkeypatch.setattr(measurement, "TOO_BUSY", 1.0)  # a machine that runs tests may well be


def figures(found: Probe) -> Measurement:
    """What was measured of environments that are not tensors."""
    assert isinstance(found.measured, Measurement)
    return found.measured


def probed(env: str, modes: list[str] | None = None, **settings: Any) -> Probe:
    options = {"env": env, **LIGHT, **settings}
    found, _ = auto_mode.look(
        modes or ["sequential", "freerun"],
        lambda mode: make_config({**options, "mode": mode}),
        fresh=True,
        say=lambda doing: None,
    )
    return found


def test_an_environment_that_sleeps_gets_more_workers_than_cores() -> None:
    found = probed("toy_envs:Audit", env_args=SLEEPING)
    env = figures(found).environment
    assert env.cpu_share < 0.3
    assert min(env.step_seconds) >= 0.02
    assert set(env.episode_lengths) == {10}
    assert env.megabytes > 1
    assert found.best.mode == "freerun"
    assert found.best.num_workers > figures(found).cores
    assert "so workers may outnumber cores" in auto_mode.sentence(found) or "learner is busy" in auto_mode.sentence(
        found
    )


def test_an_environment_that_computes_does_not() -> None:
    busy = {"kind": "busy", "mean_seconds": 0.002, "tail_seconds": 0.002}
    found = probed("freerun/Straggler-v0", env_args=busy)
    assert figures(found).environment.cpu_share > 0.5
    assert {forecast.num_workers for forecast in found.forecasts if forecast.mode == "freerun"} <= {
        1, 2, figures(found).cores, 2 * figures(found).cores
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "cpu_share", "stolen_share"),
    [
        # wall, cpu, queued, sleeps, longest step, seconds in the environment
        ((1.0, 0.99, 0.01, 0, 0.001, 0.3), 1.0, 0.01),  # CartPole on a quiet machine
        ((1.0, 0.25, 0.74, 0, 0.05, 0.3), 1.0, 0.75),  # beside six busy loops on two cores; the rest is nobody's
        ((1.0, 0.25, 0.0, 0, 0.05, 0.3), 1.0, 0.75),  # the same where no queue is counted, as under a hypervisor
        ((1.0, 0.25, 0.0, 2, 0.05, 0.4), 1 - 0.1 / (0.4 * 0.35), 0.65),  # two sleeps of at most 50 ms, and no more
        ((1.0, 0.1, 0.0, 50, 0.02, 0.95), 1 - 0.9 / 0.95, 0.0),  # steps that sleep 18 of 20 ms
        ((1.0, 0.1, 0.3, 50, 0.02, 0.95), 1 - 0.6 / (0.95 * 0.7), 0.3),  # the same with others before it in the queue
        ((1.0, 1.7, 0.0, 10, 0.02, 0.95), 1.0, 0.0),  # it computes with two threads
    ],
)
def test_sleep_is_told_from_time_that_others_had_the_core(
    numbers: tuple[float, float, float, int, float, float], cpu_share: float, stolen_share: float
) -> None:
    found = core_use(*numbers)
    assert found.cpu_share == pytest.approx(cpu_share)
    assert found.stolen_share == pytest.approx(stolen_share)


def test_cartpole_beside_busy_loops_does_not_sleep() -> None:
    """Three processes for every core: most of the time another one has it."""
    loop = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(3 * measure.num_cores())]
    try:
        policy = make_algorithm(make_config({"env": "CartPole-v1", **LIGHT}), GymnasiumFactory("CartPole-v1")).policy
        with contextlib.closing(EnvTrial(("CartPole-v1", {}, None, False, False, None))) as trial:
            trial.answer("building the environment", 60.0)
            trial.ask("play", policy, 1.0)
            played = trial.answer("playing", 60.0)
    finally:
        for process in loops:
            process.kill()
            process.wait()
    assert played.cpu_share > 0.9
    assert played.stolen_share > 0.2


def test_a_busy_machine_is_said_and_what_it_measured_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "TOO_BUSY", -1.0)
    found = probed("toy_envs:OneBit", ["sequential"])
    assert "the machine is too busy to tell; probe again when it is quiet" in auto_mode.sentence(found)
    assert findings(found)[0].startswith("The machine is too busy to tell")
    assert not any("sleep" in sentence for sentence in findings(found))
    assert not probe_cache.folder().exists()


def test_images_are_probed_with_their_cnn_and_its_cost_and_memory_are_told() -> None:
    found = probed("image_envs:FallingBall", ["sequential"], steps_per_update=44)
    measured = figures(found)
    # The picture before and after a step, 12 * 12 bytes each; 3 * 8 + 2 * 4 + 2 bytes for all else.
    assert measured.environment.bytes_per_step == 2 * 144 + 34
    assert not any("shared memory" in sentence for sentence in findings(found))
    env = dataclasses.replace(measured.environment, bytes_per_step=50_000, megabytes=30.0)
    slow = dataclasses.replace(measured, environment=env, inference_seconds=10.0)
    said = " ".join(findings(dataclasses.replace(found, measured=slow)))
    # 3 segments of 128 steps: 3 * 128 * 50,000 bytes = 19.2 MB
    assert "50 kB of shared memory" in said
    assert "Segments of 128 steps take 19 MB for each worker, beside its own 30 MB" in said
    assert "The network is slower than the environment: an action takes 10 s" in said


def test_every_mode_gets_a_prediction_or_a_reason() -> None:
    found = probed("toy_envs:OneBit", list(MODES))
    assert {forecast.mode for forecast in found.forecasts} | set(found.refused) == set(MODES)
    for forecast in found.forecasts:
        assert forecast.steps_per_second, forecast
        assert forecast.episodes_per_second == pytest.approx(forecast.steps_per_second / 10)


@pytest.mark.parametrize(
    ("how", "failure", "message"),
    [
        ("raise", EnvFailure, "the simulator fell over"),
        ("die", WorkerDied, "the process died in a step or a reset"),
        ("shape", UserError, "correct one of the two"),
        ("nan-obs", UserError, "not finite|nan"),
    ],
)
def test_an_environment_that_fails_is_said(how: str, failure: type[Exception], message: str) -> None:
    with pytest.raises(failure, match=message):
        probed("toy_envs:Broken", env_args={"how": how})


def test_an_environment_that_hangs_is_said_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STEP_SECONDS", 0.5)
    with pytest.raises(WorkerHung, match=r"(?s)took longer than 1 s.*in step"):
        probed("toy_envs:Audit", env_args={"step_seconds": 60.0})


def test_without_an_end_of_episodes_only_modes_that_need_none_are_left() -> None:
    endless = {"short": 10**9, "long": 10**9, "step_seconds": 0.001}
    found = probed("toy_envs:Audit", ["sequential", "pipes", "batch"], env_args=endless)
    assert found.best.mode == "batch"
    assert {forecast.mode for forecast in found.forecasts if forecast.note} == {"sequential", "pipes"}
    with pytest.raises(UserError, match="give --max-episode-steps"):
        auto_mode.pick([forecast for forecast in found.forecasts if forecast.mode == "pipes"])
    assert probed("toy_envs:Audit", ["freerun"], env_args=endless).best.segment_steps, "segments need no end"
    limited = probed("toy_envs:Audit", ["freerun"], env_args=endless, max_episode_steps=50)
    assert limited.best.mode == "freerun"


# ---------------------------------------------------------------------------------------------- the choice


def rates(**steps_per_second: float) -> list[Forecast]:
    return [Forecast(mode, 2, rate) for mode, rate in steps_per_second.items()]


def test_the_fastest_is_picked_and_the_preferred_of_those_about_as_fast() -> None:
    assert auto_mode.pick(rates(sequential=10, batch=100, freerun=50)).mode == "batch"
    assert auto_mode.pick(rates(pipes=101, batch=100, freerun=99)).mode == "freerun"
    many = [Forecast("freerun", count, rate) for count, rate in ((1, 50), (10, 99), (100, 100))]
    assert auto_mode.pick(many).num_workers == 10


def test_modes_that_drop_steps_or_need_a_cluster_are_picked_only_if_asked_for() -> None:
    assert auto_mode.pick(rates(sequential=10, continuous=100, ray=100)).mode == "sequential"
    assert auto_mode.pick(rates(continuous=100)).mode == "continuous"


def refused(**settings: Any) -> Mapping[str, str]:
    options = {"env": "toy_envs:OneBit", **settings}
    reasons = {}
    for mode in MODES:
        try:
            auto_mode.check_mode(mode, make_config({**options, "mode": mode}))
        except UserError as error:
            reasons[mode] = str(error)
    return reasons


def test_settings_restrict_the_choice() -> None:
    assert set(refused(deterministic=True)) == {"continuous", "batch"}
    assert set(refused(max_lag=1)) == {"sequential", "sync", "continuous"}
    assert set(refused(num_workers=3)) == {"sequential", "continuous", "batch"}
    assert set(refused(episodes_per_update=3)) == {"continuous", "batch"}
    assert set(MODES) - set(refused(pin_workers=True)) == {"freerun"}
    assert set(MODES) - set(refused(num_collectors=2)) == {"continuous"}


def test_settings_of_two_modes_leave_none() -> None:
    with pytest.raises(UserError, match=r"no mode can be used with these settings.*--mode continuous"):
        freerun.train("toy_envs:OneBit", mode="auto", pin_workers=True, num_collectors=2)


# ---------------------------------------------------------------------------------------------- the cache


def test_a_probe_is_kept_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({"env": "toy_envs:OneBit", **LIGHT})
    search = Search({"freerun": config})
    assert probe_cache.find(search) is None
    measured = probed("toy_envs:OneBit", ["freerun"]).measured
    found = probe_cache.find(search)
    assert found == measured
    assert Measurement.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    other_seed = dataclasses.replace(config, seed=7, max_lag=0, total_steps=5)
    assert probe_cache.find(Search({"freerun": other_seed})) == measured
    for change in ({"env_args": {"kind": "box"}}, {"max_episode_steps": 5}, {"learner_threads": 2}):
        assert probe_cache.find(Search({"freerun": dataclasses.replace(config, **change)})) is None
    assert probe_cache.find(Search({"freerun": config}, given={"segment_steps"})) is None, "other units are measured"
    with monkeypatch.context() as patch:
        patch.setattr(probe_cache, "num_cores", lambda: 77)
        assert probe_cache.find(search) is None
    with monkeypatch.context() as patch:
        patch.setattr(probe_cache, "version", lambda package: "9.9")
        assert probe_cache.find(search) is None


def test_an_environment_that_was_changed_is_probed_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "mine_to_change.py"
    module.write_text("from toy_envs import OneBit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    search = Search({"freerun": make_config({"env": "mine_to_change:OneBit"})})
    before = probe_cache.path_of(search)
    assert probe_cache.path_of(search) == before
    module.write_text("from toy_envs import OneBit\nNEW = 1\n")
    os.utime(module, (1, 1))
    assert probe_cache.path_of(search) != before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"measurement": {"environment": 3}}', "\x00"])
def test_a_file_that_is_no_probe_is_measured_again(content: str) -> None:
    search = Search({"freerun": make_config({"env": "toy_envs:OneBit", **LIGHT})})
    path = probe_cache.path_of(search)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert probe_cache.find(search) is None


def test_the_name_of_a_file_holds_no_argument_of_the_environment() -> None:
    search = Search({"freerun": make_config({"env": "toy_envs:OneBit", "env_args": {"kind": "box"}})})
    assert "box" not in str(probe_cache.path_of(search))
    assert env_recipe(search.configs["freerun"])[1] == {"kind": "box"}


# ---------------------------------------------------------------------------------------------- the commands


def test_probe_prints_a_table_and_the_command_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "toy_envs:OneBit", "--deterministic", "--workers", "1,3", *LIGHT_FLAGS]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("p99", "predicted steps/s", "freerun", "Recommended: ", "MB per worker", "batch is left out"):
        assert word in text, text
    assert f"freerun train toy_envs:OneBit --deterministic {' '.join(LIGHT_FLAGS)} --mode " in text


def test_probe_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["toy_envs:Audit", "--mode=freerun", *LIGHT_FLAGS, "--env-args", "long", "30"]
    assert main(["probe", "--json", "--workers", "5", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["env"] == "toy_envs:Audit"
    assert set(found["environment"]["step_seconds"]) == {"mean", "p50", "p95", "p99", "max"}
    assert [forecast["mode"] for forecast in found["predictions"]] == ["freerun"]
    assert found["recommendation"]["num_workers"] == 5
    assert found["recommendation"]["command"].startswith(f"freerun train {' '.join(words)} --num-workers 5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe", "CartPol-v1"], "there is no environment 'CartPol-v1': did you mean CartPole-v1"),
        (["probe", "CartPole-v1", "--workers", "many"], "--workers takes numbers such as 1,10,100, not 'many'"),
        (["probe", "CartPole-v1", "--workers", "0"], "--workers must be at least 1"),
        (["probe", "freerun/RoughDrone-v0", "--mode", "sync", "--deterministic"], "that are tensors are cut"),
        (["train", "CartPole-v1", "--mode", "auto", "--num-learners", "2"], "a probe knows one learner"),
        (["train", "--resume", "nowhere", "--mode", "auto"], "a run goes on in the mode that is named"),
        (["train", "--resume", "nowhere", "--num-workers", "auto"], "a run goes on in the mode that is named"),
    ],
)
def test_bad_input_gets_a_sentence(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert re.search(message, text), text


def test_auto_says_what_it_chose_and_the_run_records_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mode", "auto", "--total-episodes", "4", "--episodes-per-update", "2", "--deterministic", *LIGHT_FLAGS]
    assert main(["train", "toy_envs:OneBit", *words, "--run-dir", str(run_dir)]) == 0
    config = json.loads((run_dir / "config.json").read_text())
    assert config["mode"] in MODES
    assert isinstance(config["num_workers"], int)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("auto: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"auto: {config['mode']} with {config['num_workers']} worker")
    again = freerun.train("toy_envs:OneBit", mode="auto", total_episodes=4, episodes_per_update=2, deterministic=True,
                          run_dir=run_dir.with_name("again"), **LIGHT)  # fmt: skip
    assert again.summary["mode"] == config["mode"]
    assert "(from an earlier probe)" in capsys.readouterr().err
    # Having probed before leaves no trace in what is learned.
    plain = freerun.train("toy_envs:OneBit", mode="sequential", total_episodes=4, episodes_per_update=2,
                          deterministic=True, run_dir=run_dir.with_name("plain"), quiet=True, **LIGHT)  # fmt: skip
    policy = (run_dir / "policy.safetensors").read_bytes()
    assert policy == (plain.run_dir / "policy.safetensors").read_bytes()


def test_the_number_of_workers_alone_can_be_left_to_the_probe(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--mode", "pipes", "--num-workers", "auto", "--total-episodes", "4", "--episodes-per-update", "2"]
    assert main(["train", "toy_envs:OneBit", *words, *LIGHT_FLAGS, "--run-dir", str(run_dir)]) == 0
    config = json.loads((run_dir / "config.json").read_text())
    assert config["mode"] == "pipes"
    assert config["num_workers"] >= 1
    assert "auto: pipes with" in capsys.readouterr().err
