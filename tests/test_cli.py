"""The command line as a person meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded_python
import psutil
import pytest
from leftovers import environment

from freerun.settings import registry
from freerun.tools.cli.main import COMMANDS, UNREAD, main

TESTS = Path(__file__).parent
QUICK = ["--total-episodes", "4", "--episodes-per-update", "2", "-q"]


def freerun(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    return preloaded_python.run("-m", "freerun", *words, timeout=timeout, env={**environment(), "COLUMNS": "160"})


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command says to bad input: one sentence, exit code 2, no traceback."""
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("freerun: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


def test_train_leaves_a_whole_run_folder(run_dir: Path) -> None:
    done = freerun("train", "CartPole-v1", "--mode", "pipes", "--num_workers", "2", "--total-episodes", "20",
                   "--episodes-per-update", "10", "--run-dir", str(run_dir))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "20 episodes, 2 updates" in done.stdout
    assert "freerun · CartPole-v1 · ppo · pipes × 2 · seed 0" in done.stderr
    assert re.search(r"100%  step=\d+ episodes=20 update=2 return=", done.stderr), done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    for name in ("mode", "algo", "env", "seed", "num_workers", "env_steps", "episodes", "updates", "wall_seconds",
                 "steps_per_second", "episodes_per_second", "mean_return", "lag_mean", "lag_max", "dropped_steps",
                 "worker_restarts", "ledger"):  # fmt: skip
        assert name in summary, name
    assert summary["num_workers"] == 2
    assert summary["ledger"]["trained"] == 20
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in metrics] == [1, 2]
    assert (run_dir / "policy.safetensors").stat().st_size > 1000


def test_config_file_runs_again_to_the_same_weights(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["--hidden-sizes", "16", "--seed", "3", "--deterministic", "--env-args", "kind", "box", *QUICK]
    assert main(["train", "toy_envs:OneBit", "--run-dir", str(first), *words]) == 0
    config = json.loads((first / "config.json").read_text())
    assert config["hidden_sizes"] == [16]
    assert config["env_args"] == {"kind": "box"}
    assert main(["train", "--config", str(first / "config.json"), "--run-dir", str(second)]) == 0
    assert (first / "policy.safetensors").read_bytes() == (second / "policy.safetensors").read_bytes()
    assert json.loads((second / "config.json").read_text()) == config


def test_flags_override_the_config_file(tmp_path: Path) -> None:
    config = tmp_path / "mine.json"
    config.write_text(json.dumps({"env": "toy_envs:OneBit", "total_episodes": 4, "episodes_per_update": 2, "seed": 1}))
    words = ["--config", str(config), "--seed", "9", "--mode", "sequential", "-q", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "toy_envs:OneBit", *words]) == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["seed"], saved["episodes_per_update"], saved["mode"]) == (9, 2, "sequential")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "CartPol-v1"], "there is no environment 'CartPol-v1': did you mean CartPole-v1"),
        (["train", "CartPole-v1", "--mode", "pipes", "--segment-steps", "5"], "it belongs to --mode freerun"),
        (["train", "CartPole-v1", "--mode", "v2", "--num-collectors", "5"], "continuous; --mode batch has --num-envs"),
        (["train", "CartPole-v1", "--mode", "v1", "--num-workers", "5"], r"has --num-collectors \(4\), not"),
        (["train", "CartPole-v1", "--mode", "v1", "--num-steps-per-env=5"], "batch; --mode continuous has --num-coll"),
        (["train", "CartPole-v1", "--mode", "v1", "--max-lag=5"], "never waits.*: leave it out, or choose .*freerun"),
        (["train", "CartPole-v1", "--segment-steps=5", "--episodes-per-update", "3"], "leave --segment-steps out"),
        (["train", "freerun/Stragler-v0"], "did you mean freerun/Straggler-v0"),
        (["train", "no_such_module:Env"], "No module named 'no_such_module'"),
        (["train", "toy_envs:NoSuchEnv"], "module 'toy_envs' has no 'NoSuchEnv'"),
        (["train", "toy_envs:not_an_env"], "must return a gymnasium.Env, but returned int"),
        (["train", "toy_envs:UnsupportedObs"], "observation space .* is not supported: use a Box"),
        (["train", "toy_envs:UnsupportedAction"], "action space .* is not supported: use Discrete"),
        (["train", "toy_envs:Broken", "--env-args", "how", "nan-obs", *QUICK], "observation that is not finite"),
        (["train", "toy_envs:Broken", "--env-args", "how", "shape", *QUICK], r"shape \(7,\)"),
        (["train", "CartPole-v1", "--num-workers", "0"], "--num-workers must be at least 1, not 0"),
        (["train", "CartPole-v1", "--episodes-per-update", "0"], "--episodes-per-update must be at least 1, not 0"),
        (["train", "CartPole-v1", "--total-steps", "0"], "--total-steps must be at least 1"),
        (["train", "CartPole-v1", "--mode", "pipe"], "there is no mode 'pipe': did you mean pipes"),
        (["train", "CartPole-v1", "--mode", "warp"], "choose one of sequential, sync, pipes, executor"),
        (["train", "CartPole-v1", "--algo", "pppo"], "there is no algorithm 'pppo': did you mean ppo"),
        (["train", "CartPole-v1", "--mode", "sync", "--max-lag", "1"], "--max-lag must be 0"),
        (["train", "CartPole-v1", "--deterministic", "--max-lag", "1"], "--deterministic needs --max-lag 0"),
        (["train", "CartPole-v1", "--mode", "sequential", "--num-workers", "2"], "has one worker, not 2"),
        (["train", "CartPole-v1", "--device", "cuda:7"], "--device cuda:7 cannot be used"),
        (["train", "CartPole-v1", "--device", "gpu"], "--device gpu cannot be used"),
        (["train", "CartPole-v1", "--env-args", "colour", "red"], "CartPole-v1"),
        (["train", "CartPole-v1", "--hidden-sizes", "64", "0"], "--hidden-sizes must be at least 1, not 0"),
        (["train", "CartPole-v1", "--seed", str(1 << 64)], "--seed must lie between 0 and"),
        (["train", "CartPole-v1", "--task", "Pendulum-v1"], "are two environments: name one of them"),
        (["train", "toy_envs:NoSpaces"], "has no observation_space: set self.observation_space"),
        (["train", "Pendulum-v1", "--algo", "mbpo", "--model-hidden-sizes", "0"], "--model-hidden-sizes must be at"),
        (["train", "Pendulum-v1", "--algo", "mbpo", "--deterministic", "--stages", "concurrent"], "stages .* in turn"),
        (["watch", ".", "--port", "99999"], "--port must lie between 0 and 65535, not 99999"),
        (["eval", ".", "--seed", "-1"], "--seed must be 0 or more, not -1"),
        (["eval", "no/such/run"], "holds no finished run"),
        (["frobnicate"], "there is no command 'frobnicate'"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(message, complaint(capsys, *words))


def test_config_file_with_a_wrong_key_or_no_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"env": "CartPole-v1", "learning_rat": 0.1}')
    assert "unknown setting 'learning_rat': did you mean learning_rate?" in complaint(
        capsys, "train", "--config", str(config)
    )
    config.write_text("{")
    assert "is not valid JSON" in complaint(capsys, "train", "--config", str(config))
    assert "cannot read" in complaint(capsys, "train", "--config", str(tmp_path / "none.json"))
    for wrong in ('"num_workers": "many"', '"hidden_sizes": 5', '"seed": 1.5', '"learning_rate": "fast"', '"env": 3'):
        config.write_text(f'{{"env": "CartPole-v1", {wrong}}}')
        assert "is of the wrong kind" in complaint(capsys, "train", "--config", str(config))


def test_a_run_folder_is_never_overwritten(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    words = ["train", "toy_envs:OneBit", "--mode", "sequential", "--run-dir", str(run_dir), *QUICK]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert "already holds a run" in complaint(capsys, *words)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_refused_run_leaves_no_folder(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    complaint(capsys, "train", "CartPole-v1", "--mode", "sync", "--max-lag", "1", "--run-dir", str(run_dir))
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-workers", "many"], "--num-workers: it takes a whole number such as 1000, not 'many'"),
        (["--total-steps", "1e6"], "--total-steps: it takes a whole number such as 1000, not '1e6'"),
        (["--learning-rate", "nan"], "--learning-rate: it takes a number, not 'nan'"),
    ],
)
def test_what_is_no_number_is_told(words: list[str], message: str) -> None:
    done = freerun("train", "CartPole-v1", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--no-such-flag", "--learning-rat"])
def test_unknown_flag_exits_with_2(flag: str) -> None:
    done = freerun("train", "CartPole-v1", flag, "1")
    assert done.returncode == 2
    assert flag in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert " ".join((COMMANDS[command].__doc__ or "").split()[:3]) in text
    assert "{None}|" not in text
    assert "(default: )" not in text


def flags_shown(capsys: pytest.CaptureFixture[str], *words: str) -> set[str]:
    """The flags at the beginnings of lines, without their negations."""
    with pytest.raises(SystemExit) as end:
        main(["train", *words])
    assert end.value.code == 0
    lines = re.findall(r"^[│ ]{0,4}(?:-\w, )?(--[a-z][\w-]+)", capsys.readouterr().out, re.MULTILINE)
    return set(lines) - {"--help"}


def test_help_of_train_shows_what_most_people_need(capsys: pytest.CaptureFixture[str]) -> None:
    shown = flags_shown(capsys, "--help")
    assert 20 <= len(shown) <= 28
    assert {"--num-workers", "--episodes-per-update", "--total-steps", "--run-dir", "--resume", "--mode"} <= shown
    with pytest.raises(SystemExit):
        main(["train", "-h"])
    text = capsys.readouterr().out
    assert "--help-all shows all of them" in text
    for group in ("environment", "algorithm", "workers", "length", "output"):
        assert f"{group} options" in text


@pytest.mark.own_ray
@pytest.mark.parametrize(
    ("env", "algo", "mode"),
    [("CartPole-v1", "ppo", "freerun"), ("Pendulum-v1", "mbpo", "ray"), ("freerun/NetworkDefence-v0", "ppo", "sync")],
)
def test_help_all_shows_every_setting(env: str, algo: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = registry.flatten_config(registry.make_config({"env": env, "algo": algo, "mode": mode}))
    flags = {f"--{name.replace('_', '-')}" for name in settings if name != "env"}
    start = {"--config", "--preset", "--resume", "--trust", "--task"}
    words = [env, "--algo", algo, "--mode", mode]
    assert flags_shown(capsys, *words, "--help-all") == flags | start
    assert flags_shown(capsys, *words, "--help") < flags | start


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_fits_the_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["train", flag])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= int(columns)
        assert "default: None" not in text


def test_exception_in_the_environment_shows_its_traceback_and_seed(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    words = ["train", "toy_envs:Broken", "--env-args", "how", "raise", "--run-dir", str(run_dir), *QUICK]
    assert main(words) == 1
    text = capsys.readouterr().err
    assert "ZeroDivisionError: the simulator fell over, 100% of it" in text
    assert "toy_envs.py" in text
    assert re.search(r"seed \d+", text)
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in ("freerun/Straggler-v0", "freerun[box2d]", "ppo", "sequential", "sync", "pipes", "executor",
                 "continuous", "batch"):  # fmt: skip
        assert name in text


def test_eval_runs_and_films_a_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    run_dir = tmp_path / "run"
    assert main(["train", "CartPole-v1", "--mode", "sequential", "--run-dir", str(run_dir), *QUICK]) == 0
    capsys.readouterr()
    assert main(["eval", str(run_dir), "--episodes", "3"]) == 0
    first = capsys.readouterr().out
    assert "over 3 episodes" in first
    assert main(["eval", str(run_dir), "--episodes", "3", "--render", str(tmp_path / "film")]) == 0
    second = capsys.readouterr().out
    assert second.splitlines()[0] == first.strip(), "filming must not change the episodes"
    assert len(list((tmp_path / "film").glob("episode-*"))) == 3


def test_eval_refuses_a_damaged_policy(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    assert main(["train", "toy_envs:OneBit", "--mode", "sequential", "--run-dir", str(run_dir), *QUICK]) == 0
    capsys.readouterr()
    (run_dir / "policy.safetensors").write_bytes(b"nonsense")
    assert "is not a policy" in complaint(capsys, "eval", str(run_dir))


@pytest.mark.parametrize("mode", ["sequential", "sync", "pipes", "executor", "continuous", "batch"])
def test_ctrl_c_keeps_what_was_learned_and_leaves_no_process(mode: str, run_dir: Path) -> None:
    words = ["train", "freerun/Straggler-v0", "--mode", mode, "--total-episodes", "100000",
             "--run-dir", str(run_dir),
             "--env-args", "mean_seconds", "0.001", "tail_seconds", "0.005"]  # fmt: skip
    if mode in ("continuous", "batch"):
        words += ["--steps-per-update", "128", "--num-envs", "8"]
    else:
        words += ["--episodes-per-update", "4", *(["--num-workers", "4"] if mode != "sequential" else [])]
    process = preloaded_python.Process(
        ["-m", "freerun", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert time.monotonic() < deadline, "no update within a minute"
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 130, output
        assert "Interrupted" in output
        assert "Traceback" not in output
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert summary["updates"] >= 2
    assert main(["eval", str(run_dir), "--episodes", "1"]) == 0


def test_workers_do_not_outlive_a_learner_that_is_killed(run_dir: Path) -> None:
    words = ["train", "freerun/Straggler-v0", "--num-workers", "3", "--run-dir", str(run_dir)]
    process = preloaded_python.Process(["-m", "freerun", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    learner = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(learner.children(recursive=True)) < 5:  # fork server, resource tracker, three workers
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = learner.children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_an_environment_in_the_current_folder_is_found(tmp_path: Path) -> None:
    """By the installed command, which Python does not look for modules beside; and by its workers."""
    (tmp_path / "lies_here.py").write_text(
        "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n", encoding="utf-8"
    )
    command = [str(Path(sys.executable).with_name("freerun")), "train", "lies_here:make", "--num-workers", "2"]
    command += ["--total-steps", "500", "--steps-per-update", "250", "--quiet", "--run-dir", "run"]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "policy.safetensors").exists()


def test_output_that_nobody_reads_any_more_is_no_failure() -> None:
    """As in `freerun train --help | head -1`."""
    command = [sys.executable, "-m", "freerun", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == UNREAD
