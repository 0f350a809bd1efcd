"""The built-in network: its rules by hand-worked episodes, and that a network does not depend on its neighbours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

import freerun
import freerun.adapters.catalog
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import UserError
from freerun.tools.check_env.checks import check
from freerun_envs.network_actions import ACTION_NAMES
from freerun_envs.network_defence import NetworkDefenceVector
from freerun_envs.network_hosts import HOSTS
from freerun_envs.network_red import ESCALATE, EXPLOIT, IDLE, IMPACT, SCAN, SWEEP
from freerun_envs.single_network import NetworkDefence

RED_AGENTS = ("B_lineAgent", "RedMeanderAgent", "SleepAgent")
SLEEP = 0
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "results" / "network_defence" / "network_defence.json"

Move = tuple[int, str]


class Script:
    """A red agent that makes given moves."""

    def __init__(self, *moves: Move):
        self.moves = [(kind, HOSTS.index(name)) for kind, name in moves]
        self.outcomes: list[int] = []

    def reset(self, rows: Any, draw: Any) -> None:
        pass

    def choose(self, draw: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        kind, host = self.moves[len(self.outcomes)] if len(self.outcomes) < len(self.moves) else (IDLE, 0)
        return np.array([kind]), np.array([host])

    def observe(self, kind: Any, host: Any, outcome: NDArray[np.int64]) -> None:
        self.outcomes.append(int(outcome[0]))


class Network:
    """One network in which red follows a script and the random numbers are given."""

    def __init__(self, *moves: Move, service_draw: float = 0.0, notice_draw: float = 0.0):
        self.vector = NetworkDefenceVector(1, "SleepAgent")
        self.vector.reset([0])
        self.vector.red = self.red = Script(*moves)
        self.vector.draws[:] = (0.0, service_draw, notice_draw)

    def step(self, action: str = "Sleep") -> float:
        self.result = self.vector.step(np.array([ACTION_NAMES.index(action)]))
        return float(self.result.reward[0])

    def bits(self, name: str) -> list[int]:
        cell: list[int] = self.result.obs.reshape(13, 4)[HOSTS.index(name)].astype(int).tolist()
        return cell

    def status(self, name: str) -> int:
        return int(self.vector.host_status()[0, HOSTS.index(name)])


def total(rewards: Sequence[float]) -> float:
    return round(sum(rewards), 6)


# ---------------------------------------------------------------------------------------------- shape


def test_spaces_and_numbering_are_those_of_cage_2() -> None:
    env = NetworkDefence()
    assert env.observation_space == gymnasium.spaces.Box(0.0, 1.0, (52,), np.float32)
    assert env.action_space == gymnasium.spaces.Discrete(145)
    assert len(ACTION_NAMES) == 145
    numbered = {
        0: "Sleep",
        1: "Monitor",
        2: "Analyse Defender",
        14: "Analyse User4",
        15: "Remove Defender",
        27: "Remove User4",
        28: "DecoyApache Defender",
        40: "DecoyApache User4",
        41: "DecoyFemitter Defender",
        54: "DecoyHarakaSMPT Defender",
        67: "DecoySmss Defender",
        80: "DecoySSHD Defender",
        93: "DecoySvchost Defender",
        106: "DecoyTomcat Defender",
        119: "DecoyVsftpd Defender",
        131: "DecoyVsftpd User4",
        132: "Restore Defender",
        139: "Restore Op_Server0",
        144: "Restore User4",
    }
    assert {number: ACTION_NAMES[number] for number in numbered} == numbered


@pytest.mark.parametrize("red_agent", RED_AGENTS)
def test_no_fault_is_found(red_agent: str) -> None:
    check_env(gymnasium.make("freerun/NetworkDefence-v0", red_agent=red_agent).unwrapped)
    findings = {finding.level for finding in check("freerun/NetworkDefence-v0", {"red_agent": red_agent})}
    assert findings == ({"ok", "warning"} if red_agent == "SleepAgent" else {"ok"})  # there, a seed decides nothing


def test_bad_arguments_and_actions_are_refused() -> None:
    with pytest.raises(UserError, match="B_lineAgent, RedMeanderAgent, SleepAgent"):
        NetworkDefence(red_agent="BlineAgent")
    with pytest.raises(UserError, match="episode_steps"):
        NetworkDefence(episode_steps=0)
    env = NetworkDefence()
    env.reset(seed=0)
    for action in (-1, 145):
        with pytest.raises(IndexError):
            env.step(np.int64(action))


@pytest.mark.parametrize("episode_steps", [30, 50, 100])
def test_episodes_are_truncated_and_never_terminated(episode_steps: int) -> None:
    env = NetworkDefence("RedMeanderAgent", episode_steps)
    env.reset(seed=3)
    flags = [env.step(np.int64(SLEEP))[2:4] for _ in range(episode_steps)]
    assert flags == [(False, False)] * (episode_steps - 1) + [(False, True)]


# ---------------------------------------------------------------------------------------------- episodes by hand


def test_b_line_walks_to_the_server_while_blue_sleeps() -> None:
    network = Network()
    vector = network.vector = NetworkDefenceVector(1, "B_lineAgent")
    vector.reset([0])
    vector.draws[:] = 0.0  # by way of User1; always the favourite service, always noticed
    vector.red.reset(np.array([0]), np.array([0.0]))
    rewards = [network.step() for _ in range(16)]
    # sweep, scan; ftp gives admin access to User1 at once (0.1), which then is only looked around on; scan
    # Enterprise1, https gives a user's, escalate (1); sweep, scan; the same on Enterprise2 (1 more); scan, ssh and
    # escalate on Op_Server0 (1 more); its service is down (10) from then on.
    by_hand = [0.0] * 2 + [-0.1] * 4 + [-1.1] * 4 + [-2.1] * 3 + [-3.1] + [-13.1] * 2
    assert rewards == by_hand
    assert network.bits("Op_Server0") == [0, 0, 0, 1]  # escalation and impact leave no trace
    assert network.status("Op_Server0") == 2

    # A Restore costs 1, and brings back the service for good; red's impact and escalation fail, so it exploits again.
    assert [network.step("Restore Op_Server0"), *(network.step() for _ in range(5))] == [-3.1] + [-2.1] * 2 + [-3.1] * 3
    assert network.status("Op_Server0") == 2


def test_what_monitor_reports_of_an_attack() -> None:
    network = Network((SWEEP, "User0"), (SCAN, "Enterprise1"), (EXPLOIT, "Enterprise1"), (ESCALATE, "Enterprise1"))
    seen = []
    for _ in range(4):
        network.step()
        seen.append(network.bits("Enterprise1"))
    assert seen == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 1]]
    network.step("Analyse Enterprise1")
    assert network.bits("Enterprise1") == [0, 0, 1, 1]
    network.step("Restore Enterprise1")
    assert network.bits("Enterprise1") == [0, 0, 0, 0]


def test_an_exploit_may_go_unnoticed() -> None:
    network = Network((SCAN, "User3"), (EXPLOIT, "User3"), notice_draw=0.96)
    network.step()
    assert network.step() == -0.1  # smtp: admin access
    assert network.bits("User3") == [1, 0, 0, 0]
    network.step("Analyse User3")
    assert network.bits("User3") == [0, 0, 1, 1]


def test_operational_hosts_are_reached_only_from_an_enterprise_server() -> None:
    network = Network((SCAN, "Op_Host0"), (EXPLOIT, "Op_Host0"), (SWEEP, "Op_Host0"))
    for _ in network.red.moves:
        network.step()
        assert not network.result.obs.any()
    assert network.red.outcomes == [3, 1, 1]  # found nothing, failed, failed

    moves = [
        (SCAN, "Enterprise0"),
        (EXPLOIT, "Enterprise0"),
        *((kind, "Op_Host0") for kind in (SCAN, EXPLOIT, ESCALATE)),
    ]
    network = Network(*moves)
    assert total([network.step() for _ in moves]) == -0.1
    assert network.status("Op_Host0") == 2


def test_sleeping_red_costs_nothing_but_restores_do() -> None:
    env = NetworkDefence("SleepAgent")
    obs, _ = env.reset(seed=0)
    for _ in range(50):
        assert not obs.any()
        obs, reward, _, _, info = env.step(np.int64(SLEEP))
        assert (reward, info) == (0.0, {"success": True})
    assert env.step(np.int64(ACTION_NAMES.index("Restore User0")))[1] == -1.0
    assert env.host_status().tolist() == [0] * 8 + [2] + [0] * 4  # User0 is always lost, and costs nothing


# ---------------------------------------------------------------------------------------------- blue's actions


def test_remove_ends_what_was_noticed_of_a_user() -> None:
    network = Network((SCAN, "Enterprise1"), (EXPLOIT, "Enterprise1"), (IDLE, "Defender"), (ESCALATE, "Enterprise1"))
    network.step()
    network.step()
    assert network.status("Enterprise1") == 1
    network.step("Remove Enterprise1")
    assert network.status("Enterprise1") == 0
    assert network.bits("Enterprise1") == [0, 0, 1, 0]  # blue cannot know whether that was all
    assert network.step() == 0.0  # nothing left to escalate
    network.step("Remove Enterprise0")
    assert network.bits("Enterprise0") == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "moves", "draws", "left"),
    [
        ("Enterprise1", (SCAN, EXPLOIT, ESCALATE), {}, 2),
        ("Enterprise1", (SCAN, EXPLOIT), {"notice_draw": 0.96}, 1),
        ("Enterprise0", (SCAN, EXPLOIT), {}, 1),  # by ssh: no process of its own
    ],
    ids=["admin access", "unnoticed", "ssh"],
)
def test_remove_leaves_the_rest_and_restore_nothing(
    name: str, moves: tuple[int, ...], draws: dict[str, float], left: int
) -> None:
    network = Network(*((kind, name) for kind in moves), **draws)
    for _ in moves:
        network.step()
    network.step(f"Remove {name}")
    assert network.status(name) == left
    assert network.step(f"Restore {name}") == -1.0
    assert network.status(name) == 0
    network.step(f"Analyse {name}")
    assert network.bits(name) == [0, 0, 0, 0]  # no file is left, either


def test_a_decoy_diverts_the_exploit_of_what_red_has_found() -> None:
    attack = ((SCAN, "Enterprise1"), (EXPLOIT, "Enterprise1"))
    network = Network(*attack, *attack)
    network.step("DecoyFemitter Enterprise1")  # ftp is what red prefers
    network.step()
    assert network.bits("Enterprise1") == [1, 0, 0, 0]
    assert network.status("Enterprise1") == 0
    network.step("Restore Enterprise1")  # takes the decoy away
    network.step()
    assert network.status("Enterprise1") == 1

    network = Network(*attack)
    network.step()
    network.step("DecoyFemitter Enterprise1")  # too late: red has scanned
    assert network.status("Enterprise1") == 1

    network = Network(*attack, service_draw=0.99)  # one time in four red tries another service
    network.step("DecoyFemitter Enterprise1")
    network.step()
    assert network.status("Enterprise1") == 1


def test_a_decoy_of_ssh_looks_like_an_exploit() -> None:
    network = Network((SCAN, "User2"), (EXPLOIT, "User2"), service_draw=0.999)
    network.step("DecoySSHD User2")
    network.step()
    assert network.bits("User2") == [1, 1, 0, 1]
    assert network.status("User2") == 0


@pytest.mark.parametrize(
    ("decoy", "fits"),
    [
        ("DecoyFemitter Enterprise0", False),  # Windows only
        ("DecoyHarakaSMPT Enterprise0", True),
        ("DecoyHarakaSMPT User3", False),  # the port is in use
        ("DecoySSHD User3", True),
        ("DecoySSHD User4", False),
        ("DecoyApache Enterprise1", False),
        ("DecoyVsftpd User4", True),  # looks at another port than it takes
    ],
)
def test_decoys_need_a_free_port_and_their_system(decoy: str, fits: bool) -> None:
    env = NetworkDefence("SleepAgent")
    env.reset(seed=0)
    placed = [env.step(np.int64(ACTION_NAMES.index(decoy)))[4]["success"] for _ in range(2)]
    assert placed == [fits, fits and "Vsftpd" in decoy]


# ---------------------------------------------------------------------------------------------- seeds and neighbours


def play(env: NetworkDefence, seed: int, actions: Sequence[int]) -> list[Any]:
    obs, _ = env.reset(seed=seed)
    record: list[Any] = [obs.tolist()]
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(np.int64(action))
        record.append((obs.tolist(), reward, terminated, truncated, info, env.host_status().tolist()))
    return record


@pytest.mark.parametrize("red_agent", ["B_lineAgent", "RedMeanderAgent"])
def test_seeds_reproduce_an_episode(red_agent: str) -> None:
    actions = np.random.default_rng(0).integers(145, size=100).tolist()
    env = NetworkDefence(red_agent)
    first = play(env, 5, actions)
    assert play(env, 6, actions) != first
    assert play(env, 5, actions) == first == play(NetworkDefence(red_agent), 5, actions)

    env.reset(seed=5)
    unseeded = []
    for _ in range(10):
        env.reset()
        unseeded.append(sum(float(env.step(np.int64(action))[1]) for action in actions))
    assert len(set(unseeded)) > 1


@pytest.mark.parametrize("red_agent", RED_AGENTS)
def test_many_networks_are_as_many_single_ones(red_agent: str) -> None:
    rng = np.random.default_rng(1)
    seeds = rng.permutation(1000)[:40].tolist()
    actions = rng.integers(145, size=(60, 40))
    actions[rng.random(actions.shape) < 0.4] = SLEEP
    singles = [play(NetworkDefence(red_agent, 60), seed, actions[:, k].tolist()) for k, seed in enumerate(seeds)]
    for order in (np.arange(40), rng.permutation(40), rng.permutation(40)[:3]):
        vector = NetworkDefenceVector(len(order), red_agent, 60)
        obs = vector.reset([seeds[k] for k in order])
        assert [row.tolist() for row in obs] == [singles[k][0] for k in order]
        for step in range(60):
            obs, _, reward, terminated, truncated = vector.step(actions[step, order])
            status = vector.host_status()
            for row, k in enumerate(order):
                info = {"success": bool(vector.last_success[row])}
                found = (obs[row].tolist(), reward[row], terminated[row], truncated[row], info, status[row].tolist())
                assert found == singles[k][step + 1]


@pytest.mark.parametrize("red_agent", RED_AGENTS)
def test_networks_start_and_rest_on_their_own(red_agent: str) -> None:
    """Those whose episode is over wait, unchanged; a reset of some leaves the others alone."""
    actions = np.random.default_rng(2).integers(145, size=20)
    alone = play(NetworkDefence(red_agent, 20), 8, actions.tolist())
    vector = NetworkDefenceVector(3, red_agent, 20)
    vector.reset([7, None, None])
    for _ in range(6):
        _, _, reward, _, truncated = vector.step(np.full(3, 144))
        assert reward[1:].tolist() == [0.0, 0.0]
        assert not any(truncated)
    obs = vector.reset([None, 8, None])
    assert obs[1].tolist() == alone[0]
    ends = []
    for step, action in enumerate(actions):
        obs, _, reward, _, truncated = vector.step(np.array([144, action, 144]))
        assert (obs[1].tolist(), reward[1], truncated[1]) == (alone[step + 1][0], alone[step + 1][1], step == 19)
        ends.append(list(truncated))
    assert [step for step, ended in enumerate(ends) if ended[0]] == [13]
    last_obs, last_status = obs.copy(), vector.host_status()
    obs, _, reward, _, truncated = vector.step(np.full(3, 139))
    assert not reward.any()
    assert not any(truncated)
    np.testing.assert_array_equal(obs, last_obs)
    np.testing.assert_array_equal(vector.host_status(), last_status)


# ---------------------------------------------------------------------------------------------- red and the scores


def test_meander_takes_the_user_hosts_first_and_then_all_enterprise_servers() -> None:
    vector = NetworkDefenceVector(500, "RedMeanderAgent", 100)
    vector.reset(range(500))
    held = []
    for _ in range(100):
        vector.step(np.full(500, SLEEP))
        held.append(vector.host_status())
    taken = np.array(held)  # [step, network, host]
    first = np.where((taken > 0).any(axis=0), (taken > 0).argmax(axis=0), 100)
    enterprise, users = first[:, 1:4], first[:, 9:13]
    assert (users.min(axis=1) < enterprise.min(axis=1)).all()
    assert (enterprise.min(axis=1) < first[:, HOSTS.index("Op_Server0")]).all()
    assert (taken[-1][:, HOSTS.index("Op_Server0")] == 2).mean() > 0.95
    assert not taken[:, :, HOSTS.index("Defender")].any()
    assert (taken[:, :, HOSTS.index("User0")] == 2).all()


def defend(defender: str, obs: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.int64]:
    if defender == "random":
        return rng.integers(145, size=len(obs))
    is_suspect = obs.reshape(-1, 13, 4)[:, :, 2:].max(axis=2) > 0
    if defender == "sleep":
        return np.zeros(len(obs), np.int64)
    return np.where(is_suspect.any(axis=1), 132 + is_suspect.argmax(axis=1), SLEEP)


@pytest.mark.parametrize("red_agent", ["B_lineAgent", "RedMeanderAgent"])
@pytest.mark.parametrize("defender", ["sleep", "random", "restore on sight"])
def test_scores_lie_within_15_percent_of_cyborg(defender: str, red_agent: str) -> None:
    found = json.loads(PUBLISHED.read_text())
    rows = found.get("content", found)["scores"]  # with or without stamps
    cyborg = next(row["cyborg"] for row in rows if (row["defender"], row["red_agent"]) == (defender, red_agent))
    vector, rng = NetworkDefenceVector(1000, red_agent, 100), np.random.default_rng(0)
    obs, rewards = vector.reset(range(1000)), []
    for _ in range(100):
        obs, _, reward, _, _ = vector.step(defend(defender, obs, rng))
        rewards.append(reward.mean())
    for horizon in (30, 50, 100):
        assert sum(rewards[:horizon]) == pytest.approx(cyborg[str(horizon)]["mean"], rel=0.15)


def test_impact_needs_access_and_stops_the_service_until_a_restore() -> None:
    way = [(kind, name) for name in ("Enterprise0", "Op_Server0") for kind in (SCAN, EXPLOIT)]
    network = Network((IMPACT, "Op_Server0"), *way, (IMPACT, "Op_Server0"), (IDLE, "Defender"), (IMPACT, "Op_Server0"))
    assert total([network.step() for _ in range(5)]) == 0.0
    assert [network.step(), network.step()] == [-10.0, -10.0]
    assert network.step("Restore Op_Server0") == -1.0
    assert network.red.outcomes[0] == network.red.outcomes[-1] == 1  # failed: red had no access


# ---------------------------------------------------------------------------------------------- masks


def test_the_mask_leaves_out_decoys_that_fail_and_hosts_that_seem_clean() -> None:
    env = NetworkDefence(red_agent="SleepAgent", action_mask=True)
    _, info = env.reset(seed=0)
    allowed = {name for name, is_allowed in zip(ACTION_NAMES, info["action_mask"], strict=True) if is_allowed}
    assert {"Sleep", "Monitor", "Analyse User4", "DecoyTomcat Enterprise0"} <= allowed
    assert not any(name.startswith(("Remove", "Restore")) for name in allowed)
    placed = ACTION_NAMES.index("DecoyTomcat Enterprise0")
    assert env.step(np.int64(placed))[4]["success"]
    info = env.step(np.int64(SLEEP))[4]
    assert not info["action_mask"][placed]
    assert not env.step(np.int64(placed))[4]["success"]

    attacked = Network((SCAN, "User3"), (EXPLOIT, "User3"))
    attacked.step()
    attacked.step()
    mask = attacked.vector.action_masks()[0]
    repairs = {name for name in ACTION_NAMES if name.startswith(("Remove", "Restore"))}
    assert {name for name in repairs if mask[ACTION_NAMES.index(name)]} == {"Remove User3", "Restore User3"}


def test_without_the_option_nothing_is_different_and_with_it_one_env_equals_many() -> None:
    plain, masked = NetworkDefenceVector(2), NetworkDefenceVector(2, action_mask=True)
    adapter = GymnasiumFactory("freerun/NetworkDefence-v0", {"action_mask": True}).make_one()
    assert masked.spec == adapter.env_spec
    rows = masked.reset([4, 5])
    np.testing.assert_array_equal(rows[:, :52], plain.reset([4, 5]))
    np.testing.assert_array_equal(rows[0], adapter.reset(seed=4)[0])
    rng = np.random.default_rng(0)
    for _ in range(100):
        action = np.array([rng.choice(np.flatnonzero(row[52:])) for row in rows])
        ours, theirs = masked.step(action), plain.step(action)
        rows = ours.obs.copy()
        np.testing.assert_array_equal(rows[:, :52], theirs.obs)
        np.testing.assert_array_equal(ours.reward, theirs.reward)
        assert masked.last_success.all()
        row, *_, has_ended, _ = adapter.step(action[0])
        np.testing.assert_array_equal(rows[0, : 52 if has_ended else None], row[: 52 if has_ended else None])


def test_it_trains_with_its_masks_in_a_worker_with_many(tmp_path: Path) -> None:
    result = freerun.train(
        "freerun/NetworkDefence-v0",
        env_args={"action_mask": True},
        num_workers=1,
        envs_per_worker=4,
        segment_steps=25,
        total_steps=600,
        run_dir=tmp_path / "run",
        quiet=True,
    )
    obs, info = NetworkDefence(action_mask=True).reset(seed=3)
    action = result.policy.predict(obs, action_mask=info["action_mask"])
    assert info["action_mask"][action]
    assert len(freerun.evaluate(result.policy, episodes=2).returns) == 2
