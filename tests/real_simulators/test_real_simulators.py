"""The presets of real simulators: SUMO, grid2op on both backends, and Atari. `make test-simulators` runs it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from leftovers import OutsideRun

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import UserError
from freerun.settings.presets import PRESETS
from freerun.tools.check_env.checks import check
from freerun.tools.cli.main import main

MISSING = [name for name in ("sumo_rl", "grid2op", "ale_py") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"not installed: {', '.join(MISSING)} (make test-simulators)", allow_module_level=True)


@dataclass(frozen=True)
class Simulator:
    preset: str
    flags: tuple[str, ...]
    """They make an update small, so that a few of them take seconds."""
    num_steps: int
    env_args: dict[str, Any] = field(default_factory=dict)

    def make_env(self) -> gymnasium.Env[Any, Any]:
        settings = PRESETS[self.preset].settings
        return GymnasiumFactory(settings["env"], self.env_args, wrap=settings.get("wrap")).make_one().env


SMALL = ("--steps-per-update", "128", "--segment-steps", "32", "--num-epochs", "2")
SIMULATORS = {
    "sumo": Simulator("sumo-intersection", SMALL, 512),
    "lightsim2grid": Simulator("grid2op-case14", SMALL, 512),
    "pandapower": Simulator(
        "grid2op-case14",
        (
            "--steps-per-update",
            "16",
            "--segment-steps",
            "4",
            "--num-epochs",
            "2",
            "--env-args",
            "backend",
            "pandapower",
        ),
        48,
        {"backend": "pandapower"},
    ),
    "atari": Simulator("atari-breakout", SMALL, 384),
}
NUM_LINES = 20
"""Of case 14; the last actions connect and disconnect them."""
each_simulator = pytest.mark.parametrize("simulator", SIMULATORS.values(), ids=SIMULATORS)


@each_simulator
def test_the_command_trains_with_two_workers_and_leaves_nothing_behind(simulator: Simulator, tmp_path: Path) -> None:
    total = ("--total-steps", str(simulator.num_steps))
    arguments = ("--preset", simulator.preset, "--num-workers", "2", *simulator.flags, *total)
    with OutsideRun(arguments, tmp_path / "run", is_preloaded=False) as run:
        run.wait_for_updates(1)
        assert len(run.family()) >= 2
        assert run.process.wait() == 0, run.text
        assert run.left_after(10.0) == []
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) >= 3
    assert records[-1]["step"] == simulator.num_steps
    assert all(math.isfinite(records[-1][name]) for name in ("policy_loss", "value_loss"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["mode"], summary["num_workers"]) == ("freerun", 2)
    assert not (tmp_path / "run" / "incidents.jsonl").exists()


def play(env: gymnasium.Env[Any, Any], seed: int, num_steps: int) -> list[Any]:
    """Observations and rewards of an episode with actions that depend on the seed alone."""
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    seen: list[Any] = [np.array(obs)]
    for _ in range(num_steps):
        masks = env.get_wrapper_attr("action_masks")() if env.has_wrapper_attr("action_masks") else None
        allowed = np.flatnonzero(masks) if masks is not None else np.arange(4)
        obs, reward, terminated, truncated, _ = env.step(np.int64(rng.choice(allowed)))
        assert env.observation_space.contains(obs)
        seen += [np.array(obs), reward]
        if terminated or truncated:
            break
    return seen


@each_simulator
def test_a_seed_gives_the_same_episode_again(simulator: Simulator) -> None:
    num_steps = 12 if simulator.env_args else 60
    env = simulator.make_env()
    first = play(env, 5, num_steps)
    other = play(env, 6, num_steps)
    again = play(env, 5, num_steps)
    env.close()
    elsewhere_env = simulator.make_env()
    elsewhere = play(elsewhere_env, 5, num_steps)
    elsewhere_env.close()
    for repeated in (again, elsewhere):
        assert len(first) == len(repeated)
        assert all(np.array_equal(one, same) for one, same in zip(first, repeated, strict=True))
    assert len(first) != len(other) or any(
        not np.array_equal(one, two) for one, two in zip(first, other, strict=True)
    ), "another seed gives another episode"


@pytest.mark.parametrize("name", ["sumo", "lightsim2grid"])
def test_two_workers_play_the_episodes_of_one_process(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"total_episodes": 4, "episodes_per_update": 2, "deterministic": True, "quiet": True}
    preset = SIMULATORS[name].preset
    settings["preset"] = preset
    if name == "sumo":
        settings["env_args"] = {"num_seconds": 200}
    runs = [
        freerun.train(
            PRESETS[preset].settings["env"], mode=mode, num_workers=num_workers, run_dir=tmp_path / mode, **settings
        )
        for mode, num_workers in (("sequential", 1), ("freerun", 2))
    ]
    np.testing.assert_array_equal(runs[0].policy.weights, runs[1].policy.weights)


def test_check_env_says_that_sumo_must_be_alone_in_its_process() -> None:
    findings = check("sumo/Intersection-v0", {"num_seconds": 200})
    assert [(one.topic, one.level) for one in findings if one.level != "ok"] == [("seeding", "warning")]
    assert "one simulation per process" in next(one.found for one in findings if one.topic == "seeding")


def test_check_env_has_nothing_to_mend_in_grid2op() -> None:
    # With three time series, two seeds may play the same one, which is a warning.
    assert all(one.good for one in check("grid2op/PowerGrid-v0", {}))


def test_check_env_is_content_with_an_atari_game() -> None:
    assert all(one.level == "ok" for one in check("ale_py:ALE/Breakout-v5", {}, num_episodes=1))


def test_several_simulations_per_worker_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-workers", "2", "--envs-per-worker", "2", "--total-steps", "400", "--run-dir", str(tmp_path / "run"))
    assert main(["train", "--preset", "sumo-intersection", *flags]) == 2
    assert "SUMO has one simulation per process" in capsys.readouterr().err


def test_sumo_evaluates_between_the_episodes_of_the_same_process(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mode": "sequential", "eval_every": 80, "eval_episodes": 1, "quiet": True}
    settings |= {"total_steps": 160, "steps_per_update": 80, "env_args": {"num_seconds": 200}}
    result = freerun.train("sumo/Intersection-v0", run_dir=tmp_path / "run", **settings)
    assert result.summary["env_steps"] == 160


def test_sumo_allows_a_change_after_yellow_and_the_shortest_green() -> None:
    """A change at 10 s is yellow until 12 s and green until 17 s at least, so the next one may be at 20 s."""
    env = SIMULATORS["sumo"].make_env()
    masks = env.get_wrapper_attr("action_masks")
    env.reset(seed=0)
    found = [masks().tolist()]
    for phase in (0, 0, 2, 2):  # decided at 0, 5, 10 and 15 s
        env.step(np.int64(phase))
        found.append(masks().tolist())
    env.close()
    alone = [[True, False, False, False], [False, False, True, False]]
    assert found == [alone[0], alone[0], [True] * 4, alone[1], [True] * 4]


def test_sumo_refuses_a_net_of_several_lights_and_files_that_are_not_there() -> None:
    import sumo_rl

    nets = Path(sumo_rl.__file__).parent / "nets" / "2x2grid"
    routes = str(next(nets.glob("*.rou.xml")))
    make = gymnasium.make
    with pytest.raises(UserError, match="has 4 traffic lights"):
        make("sumo/Intersection-v0", net_file=str(nets / "2x2.net.xml"), route_file=routes)
    with pytest.raises(UserError, match="there is no net_file nowhere"):
        make("sumo/Intersection-v0", net_file="nowhere.xml", route_file=routes)
    with pytest.raises(UserError, match="give net_file and route_file, or neither"):
        make("sumo/Intersection-v0", route_file=routes)
    with pytest.raises(UserError, match="there is no reward_fn 'joy': choose diff-waiting-time or"):
        make("sumo/Intersection-v0", reward_fn="joy")


def test_an_environment_that_was_never_closed_does_not_end_the_simulation_of_the_next() -> None:
    forgotten = SIMULATORS["sumo"].make_env()
    forgotten.reset(seed=0)
    env = SIMULATORS["sumo"].make_env()
    env.reset(seed=0)
    del forgotten
    gc.collect()
    assert not env.step(np.int64(0))[3]
    env.close()


def test_the_mask_of_grid2op_forbids_exactly_what_its_rules_call_illegal() -> None:
    env: Any = SIMULATORS["lightsim2grid"].make_env()
    rng = np.random.default_rng(0)
    num_actions = int(env.action_space.n)
    verdicts = []
    env.reset(seed=0)
    for number in range(3000):
        masks = env.action_masks()
        assert masks[0], "doing nothing is always allowed"
        # Lines that are switched off, and forbidden actions, come up often enough only if they are chosen.
        kinds = (np.arange(1), np.arange(num_actions - NUM_LINES, num_actions), np.flatnonzero(~masks))
        choices = kinds[rng.choice(3, p=(0.7, 0.1, 0.2))]
        action = int(rng.choice(choices)) if len(choices) else int(rng.integers(num_actions))
        _, _, terminated, truncated, info = env.step(np.int64(action))
        verdicts.append((bool(masks[action]), not info["is_illegal"]))
        if terminated or truncated:
            env.reset(seed=number)
    env.close()
    assert all(allowed == is_legal for allowed, is_legal in verdicts)
    assert sum(not allowed for allowed, _ in verdicts) > 100


def test_the_end_of_a_time_series_truncates_and_a_lost_grid_terminates() -> None:
    """The series in the package have 575 steps, and the grid holds out for one of them if nobody acts."""
    env = SIMULATORS["lightsim2grid"].make_env()
    endings = set()
    for seed in range(8):
        env.reset(seed=seed)
        number, terminated, truncated = 0, False, False
        while not (terminated or truncated):
            _, _, terminated, truncated, _ = env.step(np.int64(0))
            number += 1
        endings.add((number == 575, terminated, truncated))
    assert (True, False, True) in endings
    env.reset(seed=0)
    rng, terminated = np.random.default_rng(0), False
    while not terminated:
        _, _, terminated, truncated, _ = env.step(np.int64(rng.integers(int(env.action_space.n))))  # type: ignore[attr-defined]
        assert not truncated
    env.close()


def test_a_grid_that_pandapower_cannot_solve_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some grids that fell apart end in this error of scipy, once in some hundred steps of random actions."""
    env = SIMULATORS["pandapower"].make_env()
    env.reset(seed=0)

    def unsolvable(*_: object, **__: object) -> None:
        raise RuntimeError("failed to factorize matrix at line 110 in file dsnode_bmod.c")

    with monkeypatch.context() as patched:
        patched.setattr(importlib.import_module("pandapower.pypower.newtonpf"), "spsolve", unsolvable)
        obs, reward, terminated, truncated, _ = env.step(np.int64(0))
    assert (reward, terminated, truncated) == (-10.0, True, False)
    assert env.observation_space.contains(obs)
    env.reset(seed=0)
    assert env.step(np.int64(0))[2:4] == (False, False)
    env.close()


def test_the_cache_of_time_series_changes_no_episode() -> None:
    episodes = []
    for cache_series in (True, False):
        env = GymnasiumFactory("grid2op/PowerGrid-v0", {"cache_series": cache_series}).make_one().env
        episodes.append(play(env, 3, 40))
        env.close()
    assert all(np.array_equal(one, other) for one, other in zip(*episodes, strict=True))


def test_another_grid_has_its_own_spaces() -> None:
    """Case 5 has 8 lines, 2 generators, 3 loads, 21 elements with a bus, and 5 substations."""
    env = GymnasiumFactory("grid2op/PowerGrid-v0", {"grid": "rte_case5_example"}).make_one().env
    assert env.observation_space.shape == (8 + 2 + 3 + 21 + 2 * 8 + 5,)
    assert len(play(env, 1, 20)) > 1
    env.close()


def test_an_unknown_grid_or_backend_is_refused() -> None:
    with pytest.raises(UserError, match="grid2op cannot make the grid 'atlantis'"):
        GymnasiumFactory("grid2op/PowerGrid-v0", {"grid": "atlantis"})
    with pytest.raises(UserError, match="choose lightsim2grid or pandapower"):
        GymnasiumFactory("grid2op/PowerGrid-v0", {"backend": "abacus"})


def test_importing_and_building_prints_nothing() -> None:
    code = (
        "from freerun.adapters.gymnasium_envs import GymnasiumFactory as F\n"
        "F('sumo/Intersection-v0'); F('grid2op/PowerGrid-v0'); F('ALE/Breakout-v5', wrap='atari')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout + done.stderr == ""
