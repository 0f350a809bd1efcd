"""Workflows: the order in the observation, compliance worked out by hand, and a reward that adds up."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from freerun.core import UserError
from freerun_envs.workflow import GROUPS, Compliance, WorkflowEnv, one_hot, read_order, repaired_host

ORDER = "op_server,enterprise,op_host,defender,user"
OTHER = "user,defender,op_host,enterprise,op_server"
REMOVE_USER1, RESTORE_USER1, RESTORE_SERVER, RESTORE_ENTERPRISE2 = 15 + 9, 132 + 9, 132 + 7, 132 + 3


class Scripted(gymnasium.Env[Any, Any]):
    """Hosts are compromised as its seed says: bit n stands for host n, and nothing changes."""

    observation_space = spaces.Box(0.0, 1.0, (52,), np.float32)
    action_space = spaces.Discrete(145)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self._status = np.array([seed >> host & 1 for host in range(13)])
        self._num_steps = 0
        return np.zeros(52, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        return np.zeros(52, np.float32), -1.0, False, self._num_steps == 4, {}

    def host_status(self) -> Any:
        return self._status


@pytest.fixture
def env_id() -> str:
    if "Scripted-v0" not in gymnasium.registry:
        gymnasium.register("Scripted-v0", entry_point=lambda **arguments: Scripted())
    return "Scripted-v0"


def compromised(*hosts: int) -> Any:
    return np.array([host in hosts for host in range(13)])


def test_the_order_as_numbers() -> None:
    code = one_hot(read_order(ORDER)).reshape(5, 5)
    assert code.sum(axis=0).tolist() == code.sum(axis=1).tolist() == [1] * 5
    assert code[0, list(GROUPS).index("op_server")] == 1
    assert code[4, list(GROUPS).index("user")] == 1


@pytest.mark.parametrize("text", ["user", "user,user,enterprise,op_host,op_server", ORDER + ",user", "a,b,c,d,e"])
def test_an_order_names_each_group_once(text: str) -> None:
    with pytest.raises(UserError, match="each of defender, enterprise"):
        read_order(text)


def test_every_host_is_in_one_group() -> None:
    assert sorted(host for hosts in GROUPS.values() for host in hosts) == list(range(13))


def test_only_remove_and_restore_repair() -> None:
    repaired = {action: host for action in range(145) if (host := repaired_host(action)) is not None}
    assert repaired == {**{15 + host: host for host in range(13)}, **{132 + host: host for host in range(13)}}


def test_compliance_by_hand() -> None:
    compliance = Compliance(read_order(ORDER))
    assert compliance.share == 1
    compliance.add(RESTORE_USER1, compromised(3, 9))  # Enterprise2 comes first
    assert compliance.share == 0
    compliance.add(RESTORE_ENTERPRISE2, compromised(3, 9))
    assert compliance.share == 1 / 2
    compliance.add(REMOVE_USER1, compromised(9))
    assert compliance.share == 2 / 3
    compliance.add(0, compromised(7))  # sleeping repairs nothing, in or out of order
    compliance.add(RESTORE_SERVER, compromised())  # nor is there an order where nobody is compromised
    assert compliance.share == 2 / 3


def test_user0_never_counts() -> None:
    compliance = Compliance(read_order(OTHER))
    compliance.add(RESTORE_SERVER, compromised(8, 7))  # `user` ranks first, but of it only User0 is compromised
    assert compliance.share == 1


def test_the_reward_adds_up_to_the_change_of_compliance(env_id: str) -> None:
    env = WorkflowEnv(env_id, ORDER, compliance_weight=10.0)
    obs, _ = env.reset(seed=1 << 3 | 1 << 9)
    assert obs.shape == env.observation_space.shape == (77,)
    assert obs.dtype == np.float32
    assert obs[52:].tolist() == one_hot(read_order(ORDER)).tolist()
    rewards = [env.step(action)[1] for action in (RESTORE_USER1, RESTORE_ENTERPRISE2, RESTORE_ENTERPRISE2, 0)]
    assert rewards == pytest.approx([-1 - 10, -1 + 5, -1 + 10 / 6, -1])
    assert sum(rewards) == pytest.approx(-4 + 10 * (env.compliance.share - 1))


def test_the_upper_bits_of_the_seed_choose_the_workflow(env_id: str) -> None:
    env = WorkflowEnv(env_id, f"{ORDER};{OTHER}", compliance_weight=10.0)
    for place, order in enumerate((ORDER, OTHER)):
        obs, _ = env.reset(seed=place << 32 | 1 << 9)
        assert obs[52:].tolist() == one_hot(read_order(order)).tolist()
        assert env.unwrapped.host_status().tolist() == compromised(9).tolist()  # type: ignore[attr-defined]


def test_an_environment_without_hosts_is_refused() -> None:
    with pytest.raises(UserError, match="cyber-defence"):
        WorkflowEnv("CartPole-v1", ORDER, 1.0)
