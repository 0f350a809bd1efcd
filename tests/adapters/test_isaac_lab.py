"""The Isaac Lab adapter, with a fake Isaac Lab that has the same traps. `make test-isaac` takes the real one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import freerun
from freerun.adapters import isaac_launch
from freerun.adapters.isaac_lab import IsaacLabEnv, make, make_here
from freerun.adapters.isaac_process import IsaacLabProcess
from freerun.core import EnvFailure, TensorStep, UserError
from freerun.tools.cli.main import main

FAKE = Path(__file__).parents[1] / "fake_isaac"
TASK = "Isaac-Counting-Direct-v0"
Make = Callable[..., IsaacLabEnv]


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("isaaclab", "isaaclab_tasks", "own_tasks")]:
        del sys.modules[name]
    for name in [name for name in gymnasium.registry if name.startswith(("Isaac-", "Own-"))]:
        del gymnasium.registry[name]


@pytest.fixture(params=[2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def fake(version: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Run code in a process that can import the fake Isaac Lab and has not done so yet."""
    monkeypatch.setenv("FAKE_ISAAC_VERSION", str(version))
    monkeypatch.syspath_prepend(str(FAKE))
    forget()
    yield version
    with contextlib.suppress(SystemExit):  # the fake of version 3 passes it on, as the real one does
        isaac_launch.stop(0)
    forget()


@pytest.fixture
def make_env(fake: int) -> Iterator[Make]:
    made: list[IsaacLabEnv] = []

    def build(**settings: Any) -> IsaacLabEnv:
        made.append(make_here(TASK, settings.pop("num_envs", 4), "cpu", 0, **settings))
        return made[-1]

    yield build
    for env in made:
        env.close()


def play(env: IsaacLabEnv, num_steps: int) -> list[TensorStep]:
    env.reset()
    return [env.step(torch.zeros(env.num_envs, 2)) for _ in range(num_steps)]


# ---------------------------------------------------------------------------------------------- steps


def test_a_step_is_true_to_the_simulator(make_env: Make) -> None:
    env = make_env()
    assert env.reset().tolist() == [[row, 0, 0] for row in range(4)]
    counts, episodes = [0] * 4, [0] * 4
    for step in play(env, 12):
        for row in range(4):
            counts[row] += 1
            assert step.reward[row] == counts[row]
            ended = counts[row] == 2 + row
            assert bool(step.terminated[row]) == (ended and row % 2 == 0)
            assert bool(step.truncated[row]) == (ended and row % 2 == 1)
            if env.spec.reports_final_obs or not ended:
                assert step.final_obs[row].tolist() == [row, episodes[row], counts[row]]
            if ended:
                counts[row], episodes[row] = 0, episodes[row] + 1
            assert step.obs[row].tolist() == [row, episodes[row], counts[row]]


def test_version_2_says_that_it_hides_final_observations(make_env: Make, version: int) -> None:
    assert make_env().spec.reports_final_obs == (version == 3)


def test_the_next_step_leaves_the_tensors_of_the_last_alone(make_env: Make) -> None:
    env = make_env()
    env.reset()
    for _ in range(6):
        step = env.step(torch.zeros(4, 2))
        before = [part.clone() for part in step]
        env.step(torch.zeros(4, 2))
        assert all(torch.equal(part, kept) for part, kept in zip(step, before, strict=True))


@pytest.mark.parametrize("version", [3])
def test_an_observation_buffer_that_is_used_again_is_noticed(make_env: Make) -> None:
    with pytest.raises(RuntimeError, match="compute_final_obs False"):
        play(make_env(reuses_obs=True), 2)


@pytest.mark.parametrize("version", [3])
def test_final_observations_can_be_given_up(make_env: Make) -> None:
    env = make_env(reuses_obs=True, compute_final_obs=False)
    play(env, 4)
    assert not env.spec.reports_final_obs


def test_where_the_horizon_is_finite_a_time_out_is_an_end(make_env: Make) -> None:
    for step in play(make_env(is_finite_horizon=True), 6):
        assert not step.truncated.any()
        assert torch.equal(step.terminated, step.obs[:, 2] == 0)


def test_the_log_is_averaged_and_never_read_twice(make_env: Make) -> None:
    env = make_env()
    play(env, 1)
    assert env.metrics() == {}  # nothing has ended
    env.step(torch.zeros(4, 2))  # row 0 ends after 2 steps
    assert env.metrics() == {"Metrics/length": 2.0, "Episode/ended": 1.0}
    assert env.metrics() == {}
    env.step(torch.zeros(4, 2))  # row 1 after 3
    env.step(torch.zeros(4, 2))  # rows 0 and 2 after 2 and 4
    assert env.metrics() == {"Metrics/length": 3.0, "Episode/ended": 1.5}
    for _ in range(2):
        env.step(torch.zeros(4, 2))
    assert env.metrics() == {"Metrics/length": pytest.approx((5 + (2 + 3) / 2) / 2), "Episode/ended": 1.5}


# ---------------------------------------------------------------------------------------------- spaces


def test_actions_without_limits_can_be_given_some(make_env: Make) -> None:
    env = make_env(clip_actions=0.5)
    assert isinstance(env.spec.action_space, spaces.Box)
    assert env.spec.action_space.high.tolist() == [0.5, 0.5]
    env.reset()
    env.step(torch.tensor([[3.0, -3.0]] * 4))
    assert env.sim.last_action.tolist() == [[0.5, -0.5]] * 4


def test_actions_have_no_limits_of_their_own(make_env: Make) -> None:
    env = make_env()
    assert not env.spec.action_space.is_bounded()  # type: ignore[union-attr]
    env.reset()
    env.step(torch.full((4, 2), 3.0))
    assert env.sim.last_action.tolist() == [[3.0, 3.0]] * 4


def test_one_choice_has_isaac_labs_shape(make_env: Make) -> None:
    env = make_env(actions=spaces.Discrete(3))
    env.reset()
    env.step(torch.tensor([0, 1, 2, 0]))
    assert env.sim.last_action.tolist() == [[0], [1], [2], [0]]


def test_the_critics_observations_stand_behind_those_of_the_policy(make_env: Make) -> None:
    env = make_env(has_critic=True)
    assert env.spec.obs_groups is not None
    assert [group.shape for group in env.spec.obs_groups.present] == [(3,), (5,)]
    assert env.spec.observation_space.shape == (8,)
    assert env.reset().tolist() == [[row, 0, 0, *[7] * 5] for row in range(4)]
    step = env.step(torch.zeros(4, 2))
    assert step.obs.tolist() == step.final_obs.tolist() == [[row, 0, 1, *[7] * 5] for row in range(4)]


def test_final_observations_hold_both_groups(make_env: Make) -> None:
    env = make_env(has_critic=True)
    env.reset()
    env.step(torch.zeros(4, 2))
    step = env.step(torch.zeros(4, 2))  # row 0 ends its episode of two steps
    assert step.obs[0].tolist() == [0, 1, 0, *[7] * 5]
    if env.spec.reports_final_obs:
        assert step.final_obs[0].tolist() == [0, 0, 2, *[7] * 5]


def test_separate_terms_are_refused_with_the_setting_that_joins_them(make_env: Make) -> None:
    with pytest.raises(UserError, match=r"position, velocity.*concatenate_terms True"):
        make_env(separate_terms=True)


def test_actions_of_other_kinds_are_refused(make_env: Make) -> None:
    with pytest.raises(UserError, match="Box, Discrete or MultiDiscrete"):
        make_env(actions=spaces.Dict({"a": spaces.Box(-1, 1, (1,), np.float32)}))


# ---------------------------------------------------------------------------------------------- settings and bad input


def test_settings_are_fields_of_the_tasks_config(make_env: Make) -> None:
    env = make_env(num_envs=7, **{"sim.dt": 0.5})
    sim = env.sim
    assert (sim.num_envs, sim.cfg.sim.dt, sim.cfg.seed, sim.cfg.sim.device) == (7, 0.5, 0, "cpu")


def test_an_unknown_setting_is_refused(make_env: Make) -> None:
    with pytest.raises(UserError, match=r"--env-args sim\.dtt.*no such field"):
        make_env(**{"sim.dtt": 0.5})


def test_an_unknown_task_lists_close_ones(fake: int) -> None:
    with pytest.raises(UserError, match=r"did you mean .*Isaac-Counting-Direct-v0.*"):
        isaac_launch.launch("Isaac-Countin-Direct-v0", 4, "cpu")


def test_a_task_that_freerun_has_itself_is_named(fake: int) -> None:
    with pytest.raises(UserError, match="freerun/RoughDrone-v0"):
        isaac_launch.launch("Isaac-Exploration-Rough-Drone-v0", 4, "cpu")


def test_a_task_of_a_module_of_your_own(fake: int) -> None:
    env = make_here("isaac:Own-v0", 4, "cpu", 0, tasks="own_tasks")
    assert env.reset().shape == (4, 3)
    env.close()


def test_one_simulation_per_process(make_env: Make) -> None:
    make_env()
    with pytest.raises(UserError, match="one task per process"):
        isaac_launch.launch("Isaac-Counting-Flat-v0", 4, "cpu")
    with pytest.raises(UserError, match="once per process"):
        make_env()


@pytest.mark.parametrize("version", [3])
def test_what_isaac_lab_lacks_is_told_in_its_own_words(fake: int) -> None:
    with pytest.raises(UserError, match=r"pip install isaaclab\[isaacsim\]"):
        isaac_launch.launch("Isaac-PhysX-Only-v0", 4, "cpu")


@pytest.mark.parametrize("version", [3])
@pytest.mark.parametrize("lacks", ["omni", "ground.usd"])
def test_files_that_cannot_be_loaded_are_told_with_the_folder_that_should_have_them(make_env: Make, lacks: str) -> None:
    with pytest.raises(UserError, match=rf"{TASK}: .*{lacks}.*set ISAACSIM_ASSET_ROOT"):
        make_env(lacks=lacks)


def test_a_start_that_may_compile_for_minutes_says_so(
    make_env: Make, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make_env()
    told = f"Isaac Lab starts {TASK}: the first time on a machine it compiles its kernels, which takes minutes\n"
    assert capsys.readouterr().err == (told if version == 3 else "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_before_the_simulator_starts(fake: int) -> None:
    with pytest.raises(UserError, match=r"--device cuda:0 needs a GPU, and there is none"):
        isaac_launch.launch(TASK, 4, "cuda:0")
    assert "isaaclab" not in sys.modules


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1"])
def test_no_such_device(device: str) -> None:
    with pytest.raises(UserError, match="there is no device"):
        isaac_launch.check_device(device)


# ---------------------------------------------------------------------------------------------- without Isaac Lab


@pytest.mark.skipif(isaac_launch.is_installed(), reason="Isaac Lab is installed")
def test_without_isaac_lab_the_drone_stands_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert isaac_launch.resolve("Isaac-Exploration-Rough-Drone-v0") == "freerun/RoughDrone-v0"
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(isaac_launch.is_installed(), reason="Isaac Lab is installed")
def test_without_isaac_lab_other_tasks_name_what_to_install() -> None:
    with pytest.raises(UserError, match="pip install isaaclab"):
        isaac_launch.resolve("Isaac-Cartpole-Direct")
    with pytest.raises(UserError, match="pip install isaaclab"):
        isaac_launch.launch("Isaac-Cartpole-Direct", 4, "cpu")


# ---------------------------------------------------------------------------------------------- its own process


def python(version: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python in which that version of Isaac Lab is installed."""
    path = os.pathsep.join([str(FAKE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "FAKE_ISAAC_VERSION": str(version)},
        timeout=100,
        check=False,
    )


def in_a_process(version: int, code: str) -> subprocess.CompletedProcess[str]:
    return python(version, "-c", code, "--task", TASK)


def test_the_app_comes_before_torch_and_does_not_see_the_command_line(version: int) -> None:
    code = (
        "import sys; from freerun.adapters import isaac_launch\n"
        f"isaac_launch.launch({TASK!r}, 4, 'cpu', headless=False)\n"
        "import isaaclab; print(*isaaclab.EVENTS); print(sys.argv[1:])"
    )
    run = in_a_process(version, code)
    assert run.stdout.splitlines()[:2] == [
        "launched [('device', 'cpu'), ('headless', False)]; torch False; arguments []",
        str(["--task", TASK]),
    ], run.stderr


@pytest.mark.parametrize("exit_code", [0, 3])
def test_the_simulator_ends_last_and_keeps_the_exit_code(version: int, exit_code: int) -> None:
    code = (
        "import sys; from freerun.adapters import isaac_launch\n"
        f"isaac_launch.launch({TASK!r}, 4, 'cpu')\n"
        f"print('trained'); isaac_launch.stop({exit_code}); sys.exit({exit_code})"
    )
    run = in_a_process(version, code)
    assert run.returncode == exit_code
    closed = {2: ["app closed"] if exit_code == 0 else [], 3: [f"closed with {exit_code}"]}[version]
    assert run.stdout.splitlines() == ["trained", *closed]


def test_a_program_that_forgets_it_still_closes_the_simulator(version: int) -> None:
    run = in_a_process(version, f"from freerun.adapters import isaac_launch; isaac_launch.launch({TASK!r}, 4, 'cpu')")
    assert run.returncode == 0
    assert "closed" in run.stdout


# ---------------------------------------------------------------------------------------------- several processes


def elsewhere(make_env: Make, **settings: Any) -> tuple[IsaacLabEnv, IsaacLabProcess]:
    """The simulation of this process, and another."""
    here, there = make_env(), make(TASK, 4, "cpu", 0, **settings)
    assert isinstance(there, IsaacLabProcess)
    return here, there


def test_a_second_simulation_has_a_process_of_its_own_and_steps_alike(
    make_env: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the other process: this one has looked before
    here, there = elsewhere(make_env)
    assert (there.spec, there.num_envs, there.device) == (here.spec, here.num_envs, here.device)
    assert torch.equal(here.reset(), there.reset())
    for _ in range(8):
        ours, theirs = here.step(torch.zeros(4, 2)), there.step(torch.zeros(4, 2))
        for name in TensorStep._fields:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    metrics = there.metrics()
    assert metrics == here.metrics()
    assert metrics
    assert not [path.name for path in tmp_path.iterdir() if "torchinductor" not in path.name]
    there.close()
    assert there.process.exitcode == 0


@pytest.mark.parametrize("version", [3])
def test_what_goes_wrong_elsewhere_is_told_here(make_env: Make) -> None:
    _, env = elsewhere(make_env, fails_at=2)
    with pytest.raises(UserError, match="no such field"):
        make(TASK, 4, "cpu", 0, speed=3)
    env.reset()
    env.step(torch.zeros(4, 2))
    with pytest.raises(EnvFailure, match="the physics engine has blown up"):
        env.step(torch.zeros(4, 2))
    assert not env.process.is_alive()


@pytest.mark.parametrize("version", [3])
def test_a_process_that_is_killed_is_missed(make_env: Make) -> None:
    _, env = elsewhere(make_env)
    env.reset()
    env.process.kill()
    with pytest.raises(EnvFailure, match=r"has died \(exit code -9\)"):
        env.step(torch.zeros(4, 2))


@pytest.mark.parametrize("version", [3])
def test_several_collectors_are_several_processes(fake: int, run_dir: Path) -> None:
    words = ["--mode", "v1", "--num-collectors", "2", "--collection-batch-size", "8", *FEW, "--run-dir", str(run_dir)]
    assert main(["train", "--task", TASK, *words, "-q"]) == 0
    assert records(run_dir)[-1]["step"] >= 96


# ---------------------------------------------------------------------------------------------- the command line

FEW = ["--num-envs", "4", "--total-steps", "96", "--steps-per-update", "32", "--minibatch-size", "16"]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def chosen(run_dir: Path) -> tuple[str, str]:
    config = json.loads((run_dir / "config.json").read_text())
    return config["env"], config["mode"]


@pytest.mark.parametrize("version", [3])
@pytest.mark.parametrize("mode", [None, "sync", "v1", "v2"])
def test_a_task_is_trained(fake: int, mode: str | None, run_dir: Path) -> None:
    words = [] if mode is None else ["--mode", mode]
    words += ["--collection-batch-size" if mode == "v1" else "--num-steps-per-env", "8"]
    assert main(["train", "--task", TASK, "--headless", *words, *FEW, "--run-dir", str(run_dir), "-q"]) == 0
    assert records(run_dir)[-1]["step"] >= 96
    # What the simulator says arrives with its steps: a record after the last of them may have nothing of it.
    assert max(record.get("Metrics/length", 0.0) for record in records(run_dir)) > 1
    assert chosen(run_dir) == (TASK, {None: "batch", "v1": "continuous", "v2": "batch"}.get(mode, mode))


@pytest.mark.parametrize("version", [3])
def test_a_trained_policy_is_tried_on_one_episode_of_each_environment(
    fake: int, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--task", TASK, *FEW, "--run-dir", str(run_dir), "-q"]) == 0
    capsys.readouterr()
    assert main(["eval", str(run_dir), "--episodes", "3"]) == 0
    # Lengths 2, 3 and 4; every step's reward is its number: returns 3, 6 and 10.
    assert capsys.readouterr().out.splitlines()[0] == (
        "return 6.33 ± 2.87 (min 3.00, median 6.00, max 10.00), length 3.0, over 3 episodes"
    )
    assert main(["eval", str(run_dir), "--render", str(run_dir / "film")]) == 2


@pytest.mark.parametrize("version", [3])
@pytest.mark.parametrize("mode", ["sync", "batch", "continuous"])
def test_evaluations_use_the_simulator_that_trains(
    fake: int, mode: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Isaac Lab simulates once per process: the fake one would refuse a second simulator."""
    words = ["--mode", mode, "--collection-batch-size" if mode == "continuous" else "--num-steps-per-env", "8"]
    words += [*FEW, "--run-dir", str(run_dir), "-q", "--eval-every", "32"]
    assert main(["train", "--task", TASK, *words, "--eval-episodes", "3"]) == 0
    evaluated = [record for record in records(run_dir) if "eval_return" in record]
    # Lengths 2, 3 and 4; every step's reward is its number: returns 3, 6 and 10.
    assert all(record["eval_return"] == pytest.approx(19 / 3) for record in evaluated)
    assert len({record["eval_step"] for record in evaluated}) >= 2
    capsys.readouterr()
    assert main(["replay", str(run_dir)]) == 2
    assert "used the simulator that trains cannot be replayed" in capsys.readouterr().err
    assert main(["train", "--task", TASK, *words[:-5], "--eval-every", "32", "--eval-episodes", "9", "-q"]) == 2
    assert "--eval-episodes 9 is more than the" in capsys.readouterr().err


def test_the_command_starts_the_app_before_torch(version: int, run_dir: Path) -> None:
    code = "import sys, isaaclab; from freerun.tools.cli.main import main; sys.exit(main() or print(*isaaclab.EVENTS))"
    run = python(version, "-c", code, "train", TASK, "--headless", *FEW, "--run-dir", str(run_dir), "-q")
    assert run.returncode == 0, run.stderr
    assert chosen(run_dir) == (TASK, "batch")
    assert "closed" in run.stdout
    assert f"torch {version == 3}" in run.stdout.splitlines()[-1]  # version 3 does not mind


@pytest.mark.parametrize("version", [2])
def test_a_simulator_that_fails_ends_the_run_with_its_own_words_and_a_policy(version: int, run_dir: Path) -> None:
    words = [TASK, *FEW, "--total-steps", "100000", "--env-args", "fails_at", "100", "--run-dir", str(run_dir)]
    run = python(version, "-m", "freerun", "train", *words)
    assert run.returncode == 1
    assert "the physics engine has blown up" in run.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert summary["updates"] >= 1
    policy = freerun.load_policy(run_dir)
    assert policy.predict(np.zeros((1, 3), np.float32)).shape == (1, 2)
    words = ["--resume", str(run_dir), "--total-steps", str(summary["env_steps"] + 96), "-q"]
    resumed = python(version, "-m", "freerun", "train", *words)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((run_dir / "summary.json").read_text())["updates"] > summary["updates"]


@pytest.mark.parametrize("version", [3])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--task", "Isaac-Countin-Direct-v0"], "did you mean Isaac-Counting-Direct-v0"),
        (["--task", TASK, "--mode", "pipes"], "use sync, continuous, batch"),
        (["--task", TASK, "--algo", "sac"], "--env-args clip_actions 1.0"),
        (["--task", TASK, "--env-args", "speed", "3"], "no such field"),
    ],
)
def test_bad_input_is_told_in_a_sentence(
    fake: int, words: list[str], expected: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--run-dir", str(run_dir)]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("version", [3])
def test_no_gpu(fake: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--task", TASK, "--device", "cuda:0"]) == 2
    assert "--device cuda:0 needs a GPU, and there is none" in capsys.readouterr().err
    assert "isaaclab" not in sys.modules


@pytest.mark.skipif(isaac_launch.is_installed(), reason="Isaac Lab is installed")
def test_the_drone_stands_in(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = "Isaac-Exploration-Rough-Drone-v0"
    assert main(["train", "--task", task, "--headless", *FEW, "--run-dir", str(run_dir), "-q"]) == 0
    assert capsys.readouterr().err == f"Isaac Lab is not installed: {task} is simulated by freerun/RoughDrone-v0\n"
    assert chosen(run_dir) == ("freerun/RoughDrone-v0", "batch")


@pytest.mark.skipif(isaac_launch.is_installed(), reason="Isaac Lab is installed")
def test_a_missing_isaac_lab(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--task", "Isaac-Cartpole-Direct", "--run-dir", str(run_dir)]) == 2
    assert "pip install isaaclab" in capsys.readouterr().err
