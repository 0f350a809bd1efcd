"""Advantages and objectives against numbers worked out by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from freerun.algorithms.ppo.objective import approx_kl, clipped_objective, policy_change
from freerun.algorithms.ppo.returns import gae, running_return, vtrace
from freerun.algorithms.ppo.training_batch import importance_weight, proximal_log_prob

GAMMA, LAMBDA = 0.5, 0.5


def column(*values: float) -> Tensor:
    return torch.tensor(values).reshape(-1, 1)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool).reshape(-1, 1)


def test_gae_by_hand() -> None:
    # delta_2 = 3 + 0.5·40 − 30 = −7               A_2 = −7
    # delta_1 = 2 + 0.5·30 − 20 = −3               A_1 = −3 + 0.25·(−7)    = −4.75
    # delta_0 = 1 + 0.5·20 − 10 = 1                A_0 = 1 + 0.25·(−4.75)  = −0.1875
    advantage = gae(
        column(1, 2, 3), column(10, 20, 30), column(20, 30, 40), flags(0, 0, 0), flags(0, 0, 0), GAMMA, LAMBDA
    )
    torch.testing.assert_close(advantage, column(-0.1875, -4.75, -7))


def test_termination_is_worth_nothing_and_truncation_the_value_of_the_final_observation() -> None:
    # terminated: 3 − 30 = −27; truncated: 3 + 0.5·40 − 30 = −7
    for terminated, expected in ((1, -27.0), (0, -7.0)):
        advantage = gae(column(3), column(30), column(40), flags(terminated), flags(1), GAMMA, LAMBDA)
        assert advantage.item() == expected


def test_nothing_leaks_across_the_end_of_an_episode() -> None:
    # Step 0 is truncated: its advantage is 1 + 0.5·4 − 10 = −7, whatever the next episode earns.
    for later in (0.0, 1000.0):
        advantage = gae(column(1, later), column(10, 20), column(4, 5), flags(0, 0), flags(1, 0), GAMMA, LAMBDA)
        assert advantage[0].item() == -7


def test_columns_are_independent() -> None:
    two = gae(
        torch.tensor([[1.0, 5.0], [2.0, 6.0]]),
        torch.zeros(2, 2),
        torch.ones(2, 2),
        torch.tensor([[False, False], [False, True]]),
        torch.tensor([[False, False], [False, True]]),
        GAMMA,
        LAMBDA,
    )
    # column 0: A_1 = 2.5, A_0 = 1.5 + 0.25·2.5; column 1: A_1 = 6, A_0 = 5.5 + 0.25·6
    torch.testing.assert_close(two, torch.tensor([[2.125, 7.0], [2.5, 6.0]]))


def test_clipped_objective_by_hand() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    # A > 0: no more than 1.2·A;  A < 0: no better than 0.8·A
    expected = torch.tensor([0.5, -0.8, 1.2, -1.5, 2.2])
    torch.testing.assert_close(clipped_objective(ratio, advantage, 0.2), expected)


def test_decoupled_objective_by_hand() -> None:
    behaviour = torch.tensor([0.2, 0.2, 0.2]).log()
    recomputed = torch.tensor([0.3, 0.3, 0.9]).log()
    lag = torch.tensor([0, 1, 2])
    proximal = proximal_log_prob(behaviour, recomputed, lag)
    torch.testing.assert_close(proximal.exp(), torch.tensor([0.2, 0.3, 0.9]))
    # 0.2/0.2 = 1; 0.3/0.2 = 1.5; 0.9/0.2 = 4.5, limited to 2
    torch.testing.assert_close(importance_weight(proximal, behaviour, 2.0), torch.tensor([1.0, 1.5, 2.0]))


def test_decoupled_objective_is_plain_ppo_without_lag_to_the_last_bit() -> None:
    behaviour = torch.randn(100)
    rounded_otherwise = behaviour + 1e-6 * torch.randn(100)
    proximal = proximal_log_prob(behaviour, rounded_otherwise, torch.zeros(100, dtype=torch.int64))
    assert torch.equal(proximal, behaviour)
    assert torch.equal(importance_weight(proximal, behaviour, 2.0), torch.ones(100))


def test_vtrace_by_hand() -> None:
    # The deltas of `test_gae_by_hand`: 1, −3, −7; weights 0.5, 1, 0.1; γλ = 0.25.
    # correction_2 = 0.1·(−7)                = −0.7      A_2 = −7
    # correction_1 = 1·(−3 + 0.25·(−0.7))    = −3.175    A_1 = −3 + 0.25·(−0.7)   = −3.175
    # correction_0 = 0.5·(1 + 0.25·(−3.175)) = 0.103125  A_0 = 1 + 0.25·(−3.175)  = 0.20625
    steps = (column(1, 2, 3), column(10, 20, 30), column(20, 30, 40), flags(0, 0, 0), flags(0, 0, 0))
    advantage, correction = vtrace(*steps, column(0.5, 1.0, 0.1), GAMMA, LAMBDA)
    torch.testing.assert_close(advantage, column(0.20625, -3.175, -7))
    torch.testing.assert_close(correction, column(0.103125, -3.175, -0.7))


def test_vtrace_is_gae_without_lag_to_the_last_bit() -> None:
    torch.manual_seed(0)
    shape = (50, 7)
    terminated, truncated = torch.rand(shape) < 0.1, torch.rand(shape) < 0.1
    steps = (torch.randn(shape), torch.randn(shape), torch.randn(shape), terminated, terminated | truncated)
    expected = gae(*steps, 0.99, 0.95)
    for result in vtrace(*steps, torch.ones(shape), 0.99, 0.95):
        assert torch.equal(result, expected)


def test_running_return_by_hand() -> None:
    # R_0 = 1; R_1 = 2 + 0.5·1 = 2.5, where the episode ends; R_2 = 3; R_3 = 4 + 0.5·3 = 5.5
    # Weights of a return before the first row: 0.5, 0.25, then nothing, for another episode has begun.
    returns, weights = running_return(column(1.0, 2, 3, 4), flags(0, 1, 0, 0), GAMMA)
    torch.testing.assert_close(returns, column(1, 2.5, 3, 5.5))
    torch.testing.assert_close(weights, column(0.5, 0.25, 0, 0))


def test_the_change_of_a_policy_by_hand() -> None:
    ratio = torch.tensor([1.0, 2.0, 0.5, 1.1])
    # mean(r − 1 − log r) = (0 + 1 − log 2 + −0.5 + log 2 + 0.1 − log 1.1) / 4; two of four ratios are outside 1 ± 0.2
    expected = (0.6 - math.log(1.1)) / 4
    torch.testing.assert_close(approx_kl(ratio.log()), torch.tensor(expected))
    torch.testing.assert_close(policy_change(ratio.log(), 0.2), torch.tensor([expected, 0.5]))
    assert policy_change(torch.empty(0), 0.2).tolist() == [0.0, 0.0]
