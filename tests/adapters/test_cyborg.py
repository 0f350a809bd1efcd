"""The CybORG adapter gives what CybORG gives: with a fake one, and with the real one if CYBORG_PATH names it."""

from __future__ import annotations

import copy
import importlib.util
import ipaddress
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import freerun
from freerun.adapters import cyborg
from freerun.adapters.cyborg import CAGE2, PATH_VARIABLE, RED_AGENTS
from freerun.core import EnvFailure, UserError
from freerun.tools.check_env.checks import check

FAKE = Path(__file__).parents[1] / "fake_cyborg"
REAL = os.environ.get(PATH_VARIABLE, "")
NUM_EPISODES = 20
Recorded = list[tuple[list[float], float, bool]]


def forget() -> None:
    for name in [name for name in sys.modules if name == cyborg.FAST or name.partition(".")[0] == "CybORG"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before and after each test; the adapter sets the variable for its workers, which would outlive the test."""
    forget()
    monkeypatch.setenv(PATH_VARIABLE, "")
    yield
    forget()


@pytest.fixture(
    params=["fake", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="CYBORG_PATH is not set"))]
)
def path(request: pytest.FixtureRequest) -> str:
    return str(FAKE) if request.param == "fake" else REAL


def actions_of(seed: int, num_steps: int = 100) -> list[int]:
    """By the seed: from all, from those that are no decoys, or mostly asleep, so that red gets everywhere."""
    rng = random.Random(seed)
    no_decoys = [*range(28), *range(132, 145)]
    choices = ([*range(145)], no_decoys, no_decoys + [0] * 200)[seed % 3]
    return rng.choices(choices, k=num_steps)


def stepping(env: CAGE2, seed: int, actions: Sequence[int]) -> Iterator[tuple[list[float], float, bool]]:
    yield env.reset(seed=seed)[0].tolist(), 0.0, False
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(np.int64(action))
        assert not terminated
        assert info == {}
        yield obs.tolist(), reward, truncated


def play(env: CAGE2, seed: int, actions: Sequence[int]) -> Recorded:
    return list(stepping(env, seed, actions))


# ---------------------------------------------------------------------------------------------- the same episodes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("red_agent", RED_AGENTS)
def test_episodes_are_those_of_the_challenge_wrapper_bit_for_bit(path: str, red_agent: str) -> None:
    """One environment for all episodes here, a new simulation for each there: so a reset leaves nothing behind."""
    env = CAGE2(red_agent, cyborg_path=path)
    agents, wrappers = sys.modules["CybORG.Agents"], sys.modules["CybORG.Agents.Wrappers"]
    scenario = str(sys.modules[cyborg.FAST].SCENARIO)
    rewards = set()
    for seed in range(NUM_EPISODES):
        simulation = sys.modules["CybORG"].CybORG(scenario, "sim", agents={"Red": getattr(agents, red_agent)})
        challenge = wrappers.ChallengeWrapper(env=simulation, agent_name="Blue", max_steps=100)
        simulation.set_seed(seed)
        expected: Recorded = [(challenge.reset().tolist(), 0.0, False)]
        for action in actions_of(seed):
            obs, reward, done, _ = challenge.step(action)
            expected.append((obs.tolist(), reward, done))
        assert play(env, seed, actions_of(seed)) == expected
        rewards |= {reward for _, reward, _ in expected}
    assert len(rewards) > (3 if red_agent != "SleepAgent" else 1), "something happened"


def test_a_seed_decides_its_episode_also_after_other_episodes_and_beside_other_environments(path: str) -> None:
    first, second = CAGE2("B_lineAgent", cyborg_path=path), CAGE2("RedMeanderAgent", cyborg_path=path)
    actions = actions_of(0), actions_of(1)
    alone = play(first, 5, actions[0]), play(second, 6, actions[1])
    assert alone[0] != alone[1]
    play(first, 7, actions_of(2, 30))  # left in the middle
    pairs = list(zip(stepping(first, 5, actions[0]), stepping(second, 6, actions[1]), strict=True))
    assert tuple(map(list, zip(*pairs, strict=True))) == alone


def test_global_generators_are_left_alone_and_do_not_matter(path: str) -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), repr(np.random.get_state())
    env = CAGE2("RedMeanderAgent", cyborg_path=path)
    expected = play(env, 1, actions_of(1))
    env.host_status()
    env.close()
    assert (random.getstate(), repr(np.random.get_state())) == before
    again = []
    for number, result in enumerate(stepping(env, 1, actions_of(1))):
        random.seed(number)
        np.random.seed(number)
        again.append(result)
    assert again == expected


def test_an_error_in_the_simulation_leaves_the_generator_alone(path: str) -> None:
    env = CAGE2(cyborg_path=path)
    env.reset(seed=0)
    before = random.getstate()
    with pytest.raises(IndexError):
        env.step(np.int64(145))
    assert random.getstate() == before


def test_environments_in_threads_do_not_disturb_each_other(path: str) -> None:
    envs = [CAGE2("RedMeanderAgent", cyborg_path=path) for _ in range(4)]
    alone = [play(env, seed, actions_of(seed)) for seed, env in enumerate(envs)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(play, envs, range(4), map(actions_of, range(4)))) == alone


def test_without_a_seed_episodes_go_on_from_the_last_one(path: str) -> None:
    one, other = CAGE2("RedMeanderAgent", cyborg_path=path), CAGE2("RedMeanderAgent", cyborg_path=path)

    def second_episode(env: CAGE2, first_seed: int | None) -> Recorded:
        env.reset(seed=first_seed)
        env.reset()
        return [(obs.tolist(), reward, done) for obs, reward, _, done, _ in map(env.step, map(np.int64, actions_of(0)))]

    assert second_episode(one, 8) == second_episode(other, 8)
    assert second_episode(one, None) != second_episode(other, 9)
    fresh = CAGE2("RedMeanderAgent", cyborg_path=path), CAGE2("RedMeanderAgent", cyborg_path=path)
    assert second_episode(fresh[0], None) != second_episode(fresh[1], None), "an environment without a seed takes one"


def test_episodes_are_truncated_never_terminated(path: str) -> None:
    env = CAGE2("SleepAgent", episode_steps=7, cyborg_path=path)
    for seed in range(2):
        assert [done for _, _, done in play(env, seed, [0] * 7)] == [False] * 7 + [True]


# ---------------------------------------------------------------------------------------------- what it says


def test_hosts_and_actions_are_in_the_order_of_the_challenge(path: str) -> None:
    env = CAGE2(cyborg_path=path)
    names = "Defender Enterprise0 Enterprise1 Enterprise2 Op_Host0 Op_Host1 Op_Host2 Op_Server0 User0 User1 User2 User3"
    assert env.hosts == (*names.split(), "User4")
    actions = [(type(action).__name__, getattr(action, "hostname", None)) for action in env.simulator.actions]
    assert actions[:2] == [("Sleep", None), ("Monitor", None)]
    for first, kind in ((2, "Analyse"), (15, "Remove"), (132, "Restore")):
        assert actions[first : first + 13] == [(kind, host) for host in env.hosts]
    assert all(kind.startswith("Decoy") for kind, _ in actions[28:132])


@pytest.mark.parametrize("red_agent", RED_AGENTS)
def test_host_status_is_the_truth(path: str, red_agent: str) -> None:
    env = CAGE2(red_agent, cyborg_path=path)
    controller: Any = env.simulator.controller
    seen = set()
    for seed in range(3):
        for _ in stepping(env, seed, actions_of(seed)):
            status = env.host_status()
            truth = controller.get_agent_state("True").data
            for host, value in zip(env.hosts, status.tolist(), strict=True):
                users = [it["Username"] for it in truth[host].get("Sessions", ()) if it["Agent"] == "Red"]
                assert value == max([2 if user in ("root", "SYSTEM") else 1 for user in users], default=0)
                seen.add(value)
    assert status.dtype == np.int64
    assert status.shape == (13,)
    assert seen >= ({0, 1, 2} if red_agent != "SleepAgent" else {0})


def test_freerun_and_gymnasium_find_no_fault(path: str) -> None:
    env_args = {"red_agent": "RedMeanderAgent", "episode_steps": 30, "cyborg_path": path}
    assert [it for it in check("cyborg/CAGE2-v0", env_args) if it.level != "ok"] == []
    check_env(gymnasium.make("cyborg/CAGE2-v0", cyborg_path=path).unwrapped, skip_render_check=True)


@pytest.mark.timeout(300)
def test_every_way_of_collecting_learns_the_same(path: str, tmp_path: Path) -> None:
    env_args = {"episode_steps": 20, "cyborg_path": path}
    options: dict[str, Any] = {"total_episodes": 8, "episodes_per_update": 4, "deterministic": True, "quiet": True}
    modes: dict[str, dict[str, Any]] = {
        "sequential": {},
        "sync": {"num_workers": 2},
        "pipes": {"num_workers": 2},
        "executor": {"num_workers": 2},
        "freerun": {"num_workers": 2, "envs_per_worker": 2},
    }
    weights = []
    for mode, more in modes.items():
        settings = {**options, **more, "env_args": env_args, "run_dir": tmp_path / mode}
        weights.append(freerun.train("cyborg/CAGE2-v0", mode=mode, **settings).policy.weights.tobytes())
    assert len(set(weights)) == 1


# ---------------------------------------------------------------------------------------------- what is done once


def test_the_scenario_is_parsed_once_per_process() -> None:
    envs = [CAGE2(red_agent, cyborg_path=str(FAKE)) for red_agent in RED_AGENTS]
    module = sys.modules["CybORG.Simulator.SimulationController"]
    assert module.SimulationController.calls == {"parse": 1}
    scenarios = [env.simulator.controller.scenario.parsed for env in envs]
    assert scenarios[0] == scenarios[1]
    assert scenarios[0] is not scenarios[1], "each simulation may change its own"


def test_steps_enumerate_no_actions_and_write_down_no_whole_network() -> None:
    env = CAGE2(cyborg_path=str(FAKE))
    enumeration = sys.modules["CybORG.Agents.Wrappers"].EnumActionWrapper.calls
    before = dict(enumeration)
    env.reset(seed=0)
    asked = []
    state = env.simulator.controller.state
    answer = state.get_true_state

    def listen(info: Any) -> Any:
        asked.append(list(info))
        return answer(info)

    state.get_true_state = listen
    for action in actions_of(0):
        env.step(np.int64(action))
    assert enumeration == before
    assert asked == [["Op_Server0"]] * 100, "the host whose service matters, and no other"


def test_a_simulation_elsewhere_in_the_process_is_not_changed() -> None:
    CAGE2(cyborg_path=str(FAKE)).reset(seed=0)
    assert sys.modules["CybORG.Simulator.State"].IPv4Network is ipaddress.IPv4Network
    assert sys.modules["CybORG.Simulator.Host"].deepcopy is copy.deepcopy


# ---------------------------------------------------------------------------------------------- finding CybORG


def altered(folder: Path, file: str, text: str) -> str:
    """A copy of the fake CybORG with a line in front of one of its files."""
    shutil.copytree(FAKE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    changed = folder / "CybORG" / file
    changed.write_text(text + changed.read_text())
    return str(folder)


@pytest.mark.parametrize("place", [".", "..", "CybORG"])
def test_the_folder_the_repository_or_the_package_will_do(place: str, tmp_path: Path) -> None:
    shutil.copytree(FAKE, tmp_path / "CybORG", ignore=shutil.ignore_patterns("__pycache__"))
    assert cyborg.find(tmp_path / "CybORG" / place) == (tmp_path / "CybORG").resolve()


def test_an_installed_one_or_the_variable_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FAKE))
    assert CAGE2().hosts[0] == "Defender"
    other = altered(tmp_path / "other", "__init__.py", "OTHER = True\n")
    monkeypatch.setenv(PATH_VARIABLE, other)
    assert cyborg.find(None) == Path(other).resolve()
    assert cyborg.find(FAKE) == FAKE.resolve(), "the argument comes first"


def test_another_copy_takes_the_place_of_the_loaded_one(tmp_path: Path) -> None:
    first = CAGE2(cyborg_path=str(FAKE))
    expected = play(first, 0, actions_of(0))
    other = altered(tmp_path / "other", "__init__.py", "OTHER = True\n")
    second = CAGE2(cyborg_path=other)
    assert sys.modules["CybORG"].OTHER
    assert play(second, 0, actions_of(0)) == play(first, 0, actions_of(0)) == expected


def test_the_path_is_left_as_it_was_and_gymnasium_stands_in_for_gym_only_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = list(sys.path)
    CAGE2(cyborg_path=str(FAKE))
    assert sys.path == before
    wrapper = sys.modules["CybORG.Agents.Wrappers"].ChallengeWrapper
    assert issubclass(wrapper, gymnasium.Env)
    if importlib.util.find_spec("gym") is None:
        assert "gym" not in sys.modules
    forget()
    gym: Any = ModuleType("gym")
    gym.Env = type("Env", (), {})
    monkeypatch.setitem(sys.modules, "gym", gym)
    CAGE2(cyborg_path=str(FAKE))
    assert issubclass(sys.modules["CybORG.Agents.Wrappers"].ChallengeWrapper, gym.Env)
    assert sys.modules["gym"] is gym


def in_folder(*files: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (in_folder(), r"^CybORG is not installed: clone https://github.com/cage-challenge/cage-challenge-2 and give"),
        (
            in_folder("cyborg/__init__.py"),
            r"a web scraper that has nothing to do with it: clone https://github.com/cage",
        ),
        (
            in_folder("CybORG/__init__.py"),
            r"a web scraper that has nothing to do with it: clone https://github.com/cage",
        ),
        (in_folder("CybORG/__init__.py", "CybORG/Simulator/State.py"), r"has no Scenario2.yaml.*give the folder"),
    ],
)
def test_what_is_installed_instead(
    make: Callable[[Path], str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(make(tmp_path))
    with pytest.raises(UserError, match=message):
        CAGE2()


def test_a_path_without_cyborg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no CybORG of CAGE challenge 2 in '.*nowhere' \(cyborg_path\): clone"):
        CAGE2(cyborg_path=str(tmp_path / "nowhere"))
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"\(CYBORG_PATH\): clone"):
        CAGE2()


def test_a_missing_dependency_is_named_and_can_be_mended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = altered(tmp_path / "needs_yaml", "Shared/__init__.py", "import yaml\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    before = random.getstate()
    with pytest.raises(UserError, match=r"CybORG needs yaml, which is not installed: pip install pyyaml"):
        CAGE2(cyborg_path=path)
    assert random.getstate() == before
    monkeypatch.setitem(sys.modules, "yaml", ModuleType("yaml"))
    assert play(CAGE2(cyborg_path=path), 0, [0])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("Agents/Wrappers/__init__.py", "from CybORG.Agents import NotThere\n"),
        ("Agents/Wrappers/__init__.py", "import CybORG.not_there\n"),
    ],
)
def test_another_generation_of_cyborg_is_refused(file: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?i)cannot be used \(.*not_?there.*\): clone"):
        CAGE2(cyborg_path=altered(tmp_path / "other", file, text))


def test_another_network_is_refused(tmp_path: Path) -> None:
    path = Path(altered(tmp_path / "small", "__init__.py", ""))
    scenario = path / cyborg.SCENARIO
    scenario.write_text(scenario.read_text().replace(', "User4"', ""))
    with pytest.raises(UserError, match="not that of CAGE challenge 2"):
        CAGE2(cyborg_path=str(path))


def test_its_own_errors_keep_their_traceback(tmp_path: Path) -> None:
    path = altered(tmp_path / "broken", "CybORG.py", "1 / 0\n")
    with pytest.raises(EnvFailure, match="ZeroDivisionError"):
        freerun.train("cyborg/CAGE2-v0", env_args={"cyborg_path": path}, quiet=True, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"red_agent": "RedMeander"}, "did you mean RedMeanderAgent"),
        ({"red_agent": "B_line"}, "did you mean B_lineAgent"),
        ({"red_agent": "?"}, "use B_lineAgent, RedMeanderAgent, SleepAgent"),
        ({"episode_steps": 0}, "episode_steps must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CAGE2(cyborg_path=str(FAKE), **arguments)


# ---------------------------------------------------------------------------------------------- workers


def test_the_fork_server_can_load_it_ahead_of_time() -> None:
    """What cannot be loaded must be an ImportError: that is what the fork server passes over."""
    command = (
        "import sys\n"
        "try:\n    import freerun.adapters.cyborg_preload\n"
        "except ImportError as error:\n    print(error)\n"
        "print('CybORG' in sys.modules, 'torch' in sys.modules)"
    )
    for path, expected in (
        (str(FAKE), "True False"),
        ("/nowhere", "CybORG cannot be loaded ahead of time\nFalse False"),
    ):
        environment = {**os.environ, PATH_VARIABLE: path}
        done = subprocess.run(
            [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
