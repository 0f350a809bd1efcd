"""Exported policies act as the trained ones do, in every format, for every kind of policy, and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from policy_kinds import KINDS

import freerun
from freerun.core import UserError
from freerun.run.export_formats import FORMATS, PolicyOutputs, run_trained
from freerun.run.exported_module import ExtendedObservation, observation_parts
from freerun.run.parity import TOLERANCE, compare, draw
from freerun.tools.cli.main import main

SOURCE = Path(freerun.__file__).parent.parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, kind in KINDS.items():
        freerun.train(**kind.train_settings(), mode="sequential", total_episodes=6, run_dir=folder / name)
    return {name: folder / name for name in KINDS}


def need(to: str) -> None:
    package = FORMATS[to].package
    if package is not None and not package.is_installed:
        pytest.skip(package.advice)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", KINDS)
def test_every_format_of_every_policy_acts_as_the_trained_one(name: str, to: str, runs: dict[str, Path]) -> None:
    need(to)
    if to == "numpy" and KINDS[name].workers_need_torch:
        with pytest.raises(
            UserError, match="numpy cannot run a network of your own or impala: export it with --to onnx"
        ):
            freerun.export(runs[name], to)
        return
    # A thousand unless one says otherwise, which takes seconds for some networks.
    fewer: dict[str, Any] = {} if name == "discrete" else {"observations": 100}
    found = freerun.export(runs[name], to, **fewer)
    assert found.parity.holds
    assert found.parity.num_observations == (1000 if name == "discrete" else 100)
    assert found.parity.source == "recorded by playing the environment"
    assert found.parity.largest_difference <= TOLERANCE
    # Observations that nobody has seen, and one alone, as a robot has it.
    policy = freerun.load_policy(runs[name])
    unseen = draw(policy, seed=1, number=50)
    run = FORMATS[to].open(found.path, policy)
    ours, theirs = run_trained(policy)(unseen), run(unseen)
    assert theirs.action.dtype == policy.action_space.dtype
    assert theirs.action.shape == (50, *(policy.action_space.shape or ()))
    assert all(action in policy.action_space for action in theirs.action)
    np.testing.assert_allclose(theirs.action, ours.action, rtol=TOLERANCE, atol=TOLERANCE)
    if policy.has_logits:
        np.testing.assert_allclose(theirs.logits, ours.logits, rtol=TOLERANCE, atol=TOLERANCE)  # type: ignore[arg-type]
    np.testing.assert_allclose(run(unseen[:1]).action, ours.action[:1], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_file_with_a_memory_goes_on_from_what_it_returned(runs: dict[str, Path], tmp_path: Path) -> None:
    """As a robot runs it: zeros when an episode begins, and then the memory that the step before has returned."""
    policy = freerun.load_policy(runs["gru"])
    kind = FORMATS["torchscript"]
    kind.write(policy, tmp_path / "policy.pt")
    run, ours = kind.open(tmp_path / "policy.pt", policy), policy.new_memory()
    theirs, rng = policy.new_memory(), np.random.default_rng(0)
    for _ in range(20):
        obs = rng.random(policy.observation_space.shape or ()).astype(np.float32)
        expected = policy.logits(obs, memory=ours)
        outputs = run([ExtendedObservation(obs, memory=theirs)])
        assert outputs.logits is not None
        assert outputs.next_memory is not None
        np.testing.assert_allclose(outputs.logits[0], expected, atol=TOLERANCE)
        theirs = outputs.next_memory[0]
    np.testing.assert_allclose(theirs, ours, atol=TOLERANCE)
    contract = json.loads(freerun.export(runs["gru"], "numpy").contract_path.read_text())
    names = [[entry["name"] for entry in contract[part]] for part in ("inputs", "outputs")]
    assert names == [["observation", "memory"], ["action", "logits", "next_memory"]]


@pytest.mark.parametrize(("name", "sum_of_limits"), [("discrete", 5 + 6), ("multidiscrete", np.array([1, 2]))])
def test_parity_is_of_the_actions_too(name: str, sum_of_limits: Any, runs: dict[str, Path]) -> None:
    """The same logits with other choices, or with numbers that are no choices, are no parity."""
    policy = freerun.load_policy(runs[name])
    trained, found = run_trained(policy), draw(policy, seed=1, number=20)

    def holds(change: Callable[[Any], Any]) -> bool:
        def exported(observations: Sequence[Any]) -> PolicyOutputs:
            outputs = trained(observations)
            return outputs._replace(action=change(outputs.action))

        return compare(trained, exported, found, "drawn", policy.action_space).holds

    assert holds(lambda action: action)
    assert not holds(lambda action: sum_of_limits - action)
    assert not holds(lambda action: action + 10)


def test_actions_are_clipped_to_the_limits_of_the_environment(runs: dict[str, Path], tmp_path: Path) -> None:
    policy = freerun.load_policy(runs["box"])
    policy.actor.load(policy.weights * np.float32(1000))
    kind = FORMATS["torchscript"]
    kind.write(policy, tmp_path / "policy.pt")
    actions = kind.open(tmp_path / "policy.pt", policy)([np.array([1.0, 0.0])]).action
    assert set(np.abs(actions).ravel().tolist()) == {1.0}


def test_the_contract_says_what_goes_in_and_what_comes_out(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "walker.npz"
    words = ["export", str(runs["dict"]), "--to", "numpy", "--output", str(path), "--observations", "20"]
    assert main([*words, "--frequency", "50"]) == 0
    printed = capsys.readouterr().out
    assert f"policy: {path}\ncontract: {path}.json\nparity: largest absolute difference 0" in printed
    assert "over 20 observations recorded by playing the environment" in printed
    contract = json.loads(Path(f"{path}.json").read_text())
    assert contract["contract_version"] == 1
    assert (contract["format"], contract["file"], contract["run"]) == ("numpy", "walker.npz", "dict")
    assert (contract["algorithm"], contract["environment"]) == ("ppo", "many_parts_env:ManyParts")
    assert (contract["frequency_hz"], contract["frequency_from"]) == (50.0, "--frequency")
    assert contract["units"] == {"observation.speed": "m/s"}
    inputs = {entry.pop("name"): entry for entry in contract["inputs"]}
    assert list(inputs) == ["observation.bits", "observation.pair.0", "observation.pair.1", "observation.speed"]
    assert inputs["observation.pair.0"] == {"shape": ["batch"], "dtype": "int64", "low": 3, "high": 6}
    assert inputs["observation.pair.1"] == {"shape": ["batch", 2], "dtype": "int64", "low": 0, "high": [1, 2]}
    assert inputs["observation.speed"] == {
        "shape": ["batch", 1, 2],
        "dtype": "float32",
        "low": "-inf",
        "high": "inf",
    }
    action, logits = contract["outputs"]
    assert action == {"name": "action", "shape": ["batch"], "dtype": "int64", "low": 5, "high": 6}
    assert logits == {"name": "logits", "shape": ["batch", 2], "dtype": "float32"}
    assert contract["parity"]["num_observations"] == 20


def test_the_frequency_may_come_from_the_environment(runs: dict[str, Path], tmp_path: Path) -> None:
    found = freerun.export(runs["sac"], "numpy", tmp_path / "policy.npz", observations=5)
    contract = json.loads(found.contract_path.read_text())
    assert contract["frequency_hz"] == 30
    assert contract["outputs"] == [
        {"name": "action", "shape": ["batch", 1], "dtype": "float32", "low": -2.0, "high": 2.0}
    ]


def test_without_its_environment_observations_are_drawn_and_that_is_said(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    for name in ("box", "dict"):
        found = freerun.export(runs[name], "torchscript", tmp_path / "policy.pt", observations=30)
        assert found.parity.holds
        assert "drawn at random, as there is no environment: " in str(found)
        assert "names code to run: " in str(found)
    found = freerun.export(runs["box"], "numpy", tmp_path / "policy.npz", observations=30, trust=["toy_envs:OneBit"])
    assert found.parity.source == "recorded by playing the environment"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "numpy", "--output", "policy.onnx"], "--output policy.onnx must end with .npz"),
        (["--to", "numpy", "--frequency", "0"], "--frequency must be more than 0 Hz, not 0"),
        (["--to", "numpy", "--observations", "0"], "--observations must be at least 1, not 0"),
    ],
)
def test_a_wrong_flag_is_answered_with_a_sentence(
    words: list[str], sentence: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(runs["discrete"]), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_format_that_is_unknown_is_refused(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="there is no format 'tflite': use --to onnx, torchscript, numpy"):
        freerun.export(runs["discrete"], "tflite")


def test_a_network_that_is_no_graph_is_refused_or_found_out(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ONNX's exporter notices it. TorchScript's follows one branch, and then the parity check notices."""
    need("onnx")
    settings: dict[str, Any] = {"total_episodes": 4, "episodes_per_update": 2, "max_episode_steps": 50, "quiet": True}
    freerun.train("Pendulum-v1", mode="sequential", run_dir=run_dir, network="toy_networks:branching", **settings)
    with pytest.raises(UserError, match="torch cannot export this network to ONNX: "):
        freerun.export(run_dir, "onnx")
    assert main(["export", str(run_dir), "--to", "torchscript"]) == 1
    assert "differs from the trained policy by more than 1e-05: do not use it" in capsys.readouterr().out


def test_an_observation_that_is_no_array_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be exported"):
        observation_parts(spaces.Dict({"words": spaces.Text(5)}))


# ---------------------------------------------------------------------------------------------- where it is used

ROBOT = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "toy_envs", "safetensors", "psutil", "tyro", "rich", "gymnasium.envs.classic_control"):
            raise ModuleNotFoundError(f"{name} is not installed on the robot")

sys.meta_path.insert(0, Nothing())
import freerun

policy = freerun.load_policy("policy.npz", seed=0)
obs = eval(sys.argv[1])
print(repr(policy.predict(obs)), policy.predict(obs, deterministic=False) in policy.action_space)
"""


@pytest.mark.parametrize(("name", "obs"), [("discrete", [1.0, 0.0]), ("box", [1.0, 0.0]), ("sac", [1.0, 0.0, 0.5])])
def test_a_robot_needs_numpy_and_gymnasium_alone(
    name: str, obs: list[float], runs: dict[str, Path], tmp_path: Path
) -> None:
    freerun.export(runs[name], "numpy", tmp_path / "policy.npz", observations=5)
    bare = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-c", ROBOT, repr(obs)]
    done = subprocess.run(words, cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{freerun.load_policy(runs[name]).predict(obs)!r} True\n"


def test_files_that_are_no_policy_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    for content in (b"", b"no archive", b"PK\x05\x06" + b"\0" * 18):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a policy that freerun exported"):
            freerun.load_policy(path)
    freerun.export(runs["discrete"], "numpy", path, observations=5)
    arrays = dict(np.load(path))
    for name, wrong in {"0.weight": arrays["0.weight"] * np.nan, "0.bias": arrays["0.bias"][1:]}.items():
        np.savez(path, **{**arrays, name: wrong})
        with pytest.raises(UserError, match=r"not finite|do not fit"):
            freerun.load_policy(path)
    (tmp_path / "policy.onnx").write_bytes(b"")
    with pytest.raises(UserError, match="ONNX files are for onnxruntime"):
        freerun.load_policy(tmp_path / "policy.onnx")


def test_an_exported_policy_has_logits_and_no_run(runs: dict[str, Path], tmp_path: Path) -> None:
    path = freerun.export(runs["discrete"], "numpy", tmp_path / "policy.npz", observations=5).path
    policy = freerun.load_policy(path)
    logits = policy.logits([1.0, 0.0])
    assert policy.predict([1.0, 0.0]) == 5 + int(logits.argmax())
    np.testing.assert_allclose(policy.logits([[1.0, 0.0]] * 2), [logits, logits], rtol=1e-5)
    nobody = np.zeros((0, 2))
    assert (policy.predict(nobody).shape, policy.logits(nobody).shape) == ((0,), (0, 2))
    with pytest.raises(UserError, match="does not know the settings of its run"):
        freerun.evaluate(policy, episodes=1)
    with pytest.raises(UserError, match="have no logits"):
        freerun.load_policy(runs["box"]).logits([1.0, 0.0])
