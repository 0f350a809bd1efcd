"""Whole federations through Flower's simulation engine. `make test-federated` runs it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from leftovers import OutsideRun

if importlib.util.find_spec("flwr") is None:
    pytest.skip("Flower is not installed: make test-federated", allow_module_level=True)

import freerun
from freerun.core import LearnerFailure
from freerun.settings.registry import make_config
from freerun.tools.federation import site_link
from freerun.tools.federation.federation import FlowerProcess, federate, follow
from freerun.tools.federation.federation_options import FederationOptions
from freerun.tools.federation.moment_merging import make_moments
from freerun.tools.federation.shared_state import SharedState
from freerun.tools.federation.site_processes import SiteProcesses

PPO: dict[str, Any] = {
    "env": "CartPole-v1",
    "mode": "sequential",
    "num_workers": 1,
    "total_steps": 2000,
    "steps_per_update": 200,
    "hidden_sizes": (8,),
    "deterministic": True,
    "quiet": True,
}


def policy_of(run_dir: Path) -> Any:
    return freerun.load_policy(run_dir).weights


def test_one_site_equals_plain_training_bit_for_bit(tmp_path: Path) -> None:
    settings = {**PPO, "mode": "freerun", "total_steps": 1200}
    plain = freerun.train(**settings, run_dir=tmp_path / "plain")
    num_updates = plain.summary["updates"]
    options = FederationOptions(rounds=num_updates, updates_per_round=1)
    result = federate({"alone": make_config(settings)}, options, tmp_path / "federation")
    np.testing.assert_array_equal(policy_of(result.run_dirs["alone"]), plain.policy.weights)
    assert len(result.rounds) == num_updates
    assert sum(figures["sites"]["alone"]["steps"] for figures in result.rounds) == plain.summary["env_steps"]


class DiesOnce(CartPoleEnv):
    """Kills its process in an episode, unless a file says that this has happened already."""

    def __init__(self, marker: str, deadly_episode: int):
        super().__init__()
        self._marker, self._left = Path(marker), deadly_episode

    def reset(self, **arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._marker.exists():
            self._marker.touch()
            os._exit(9)
        return super().reset(**arguments)


class Rogue:
    """A site that sends nonsense: numbers that are not finite, then other shapes, then poison."""

    def __init__(self, socket: Path):
        self._listener = site_link.listen(socket)
        self.num_rounds = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        order = ""
        while order != site_link.FINISH:
            with self._listener.accept() as connection:
                header, shared = site_link.receive(connection)
                order = header["order"]
                if order == site_link.TRAIN:
                    self.num_rounds += 1
                answer = {"site": "rogue", "steps": 10**9, "updates": 1, "mean_return": 1e9}
                with contextlib.suppress(ConnectionError):
                    site_link.send(connection, answer, self._garbled(shared))

    def _garbled(self, shared: SharedState) -> SharedState:
        poison = {path: make_moments(1e30, m.mean + 1e6, m.variance) for path, m in shared.moments.items()}
        if not shared.weights:  # before the first round: other networks
            return SharedState({"v": np.ones(3, np.float32)}, poison)
        weights = dict(shared.weights)
        for name, array in weights.items():
            weights[name] = [array * np.nan, array[:1], array - 1e6][min(self.num_rounds, 3) - 1]
        return SharedState(weights, poison)

    def close(self) -> None:
        self._thread.join(30)
        self._listener.close()


def test_a_site_dies_and_returns_while_another_one_sends_garbage(tmp_path: Path) -> None:
    names = ("a", "b", "dies")
    configs = {name: make_config({**PPO, "run_dir": tmp_path / name, "seed": k}) for k, name in enumerate(names)}
    fatal = {"env": DiesOnce, "env_args": {"marker": str(tmp_path / "marker"), "deadly_episode": 30}}
    configs["dies"] = make_config({**PPO, **fatal, "run_dir": tmp_path / "dies", "checkpoint_every": "1"})
    sockets = {name: tmp_path / f"{name}.sock" for name in (*configs, "rogue")}
    options = FederationOptions(
        rounds=6, updates_per_round=1, strategy="fedmedian", min_sites=4, round_timeout=120, reach_timeout=60
    )
    rogue = Rogue(sockets["rogue"])
    running = SiteProcesses(configs, {name: sockets[name] for name in configs})
    rounds: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as ray_folder:
            flower = FlowerProcess(tuple(sockets.values()), options, tmp_path / "federation", Path(ray_folder))
            try:
                follow(flower, running, rounds.append)
            finally:
                flower.close()
        rogue.close()
    finally:
        running.close(are_told=len(rounds) == 6)

    assert [figures["round"] for figures in rounds] == [1, 2, 3, 4, 5, 6]
    assert rogue.num_rounds == 6
    assert "not finite" in rounds[0]["refused"]["rogue"]
    assert "have the shape" in rounds[1]["refused"]["rogue"]
    assert all("rogue" in figures["sites"] for figures in rounds[2:])
    # One round is without the site that died, and it takes part in the last one again.
    missed = [figures["round"] for figures in rounds if "dies" not in figures["sites"]]
    assert len(missed) == 1
    assert missed[0] < 6
    assert "died" in str(rounds[missed[0] - 1]["refused"])
    # The median has kept the poison out, of weights and of moments.
    policies = {name: policy_of(tmp_path / name) for name in configs}
    assert np.abs(policies["a"]).max() < 100
    for name in names[1:]:
        np.testing.assert_array_equal(policies[name], policies["a"])


def test_privacy_clips_what_a_site_sends(tmp_path: Path) -> None:
    settings = {**PPO, "normalize_obs": False, "normalize_reward": False}
    start = freerun.train(**{**settings, "total_steps": 1, "learning_rate": 1e-12}, run_dir=tmp_path / "start")
    options = FederationOptions(
        rounds=1, updates_per_round=2, privacy="central", clipping_norm=1e-3, noise_multiplier=0.0
    )
    result = federate({"a": make_config(settings)}, options, tmp_path / "federation")
    change = np.linalg.norm(policy_of(result.run_dirs["a"]) - start.policy.weights)
    assert 0 < change <= 1.01e-3


def test_privacy_and_normalisers_do_not_go_together(tmp_path: Path) -> None:
    options = FederationOptions(rounds=1, updates_per_round=1, privacy="local")
    with pytest.raises(LearnerFailure, match="would leave the site without noise"):
        federate({"a": make_config(PPO)}, options, tmp_path / "federation")


def test_a_site_that_cannot_begin_ends_the_federation(tmp_path: Path) -> None:
    config = make_config({**PPO, "env": "no_such_module:Env"})
    with pytest.raises(LearnerFailure, match=r"the site a has failed: .*no_such_module"):
        federate({"a": config}, FederationOptions(rounds=1), tmp_path / "federation")


def test_a_kill_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """Ray's agents would wait a minute for the others, and its files and our sockets would stay for ever."""
    words = ["CartPole-v1", "--mode", "sequential", "--steps-per-update", "200", "--hidden-sizes", "8"]
    words += ["--rounds", "1000", "--updates-per-round", "1", "--site", "a", "--site", "b"]
    rounds = tmp_path / "federation" / "federation.jsonl"
    with OutsideRun(words, tmp_path / "federation", ("-m", "freerun", "federate"), is_preloaded=False) as run:
        deadline = time.monotonic() + 120
        while not rounds.exists():
            assert run.process.poll() is None, run.text
            assert time.monotonic() < deadline, run.text
            time.sleep(0.1)
        assert any("raylet" in process.name() for process in run.family())
        run.process.kill()
        run.process.wait(10)
        assert not run.left_after(seconds=10)
