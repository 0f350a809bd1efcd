"""The learned model: its loss by hand, early stopping with each network's own best weights, and its rollouts."""

from __future__ import annotations

import math
from collections import Counter

import gymnasium
import numpy as np
import pytest
import torch

from freerun.algorithms.mbpo import terminations
from freerun.algorithms.mbpo.dynamics import Dynamics
from freerun.algorithms.mbpo.ensemble import EliteModel, Ensemble, InputScale, gaussian_loss, split_and_bound
from freerun.algorithms.mbpo.mbpo_config import DynamicsConfig
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.core import UserError

CPU = torch.device("cpu")
SMALL = DynamicsConfig(model_hidden_sizes=(32, 32), num_models=4, num_elites=2, buffer_size=5000, termination="never")


def pendulum(num_rows: int, seed: int = 0) -> StepBatch:
    """A made-up system: a step adds 0.1 of the action to the first number; past 1 it ends. Reward: the second."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.rand((num_rows, 2), generator=generator) * 2 - 1
    action = torch.rand((num_rows, 1), generator=generator) * 2 - 1
    next_obs = obs + torch.cat([0.1 * action + 0.1, -0.2 * obs[:, :1]], dim=1)
    return StepBatch(obs, action, 3 * obs[:, 1], next_obs, (next_obs[:, 0] > 0.5).float())


def trained(config: DynamicsConfig, max_updates: int = 600) -> tuple[Dynamics, EliteModel]:
    dynamics = Dynamics(config, 2, 1, 0, CPU)
    model = EliteModel(Ensemble.of(config, config.num_elites, 2, 1), config.termination, 0)
    dynamics.prepare(pendulum(2000))
    dynamics.fit(max_updates)
    dynamics.hand_over(model)
    return dynamics, model


def test_the_loss_by_hand() -> None:
    mean, target = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[2.0, 0.0]]])
    log_variance = torch.tensor([[[0.0, math.log(4.0)]]])
    # (1² / 1 + 0 + 2² / 4 + log 4) / 2
    assert gaussian_loss(mean, log_variance, target).tolist() == pytest.approx([(1 + 1 + math.log(4)) / 2])


def test_log_variances_stay_between_their_bounds() -> None:
    low, high = torch.full((1, 1, 1), -10.0), torch.full((1, 1, 1), 0.5)
    for raw, expected in ((100.0, 0.5), (-100.0, -10.0), (-4.0, -4.0)):
        output = torch.tensor([[[7.0, raw]]])
        mean, log_variance, end = split_and_bound(output, low, high)
        assert mean.item() == 7
        assert log_variance.item() == pytest.approx(expected, abs=0.02)
        assert end.numel() == 0


def test_scales_come_back() -> None:
    scale, rows = InputScale(2, CPU), torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    scale.fit(rows)
    assert scale.mean.tolist() == [2, 5]
    assert scale.std.tolist() == pytest.approx([math.sqrt(2), 1.0])  # what never changes is left as it is
    assert torch.allclose(scale.undo(scale.apply(rows)), rows)


def test_weight_decay_is_the_papers_per_layer() -> None:
    config = DynamicsConfig(model_hidden_sizes=(3, 3, 3, 3), num_models=1, num_elites=1)
    dynamics = Dynamics(config, 2, 1, 0, CPU)
    counts = Counter(round(decay, 9) for decay in dynamics.weight_decay.tolist())
    found = {decay: count for decay, count in counts.items() if decay}
    # 3 inputs; outputs: 3 means, 3 log-variances, 1 end.
    assert found == {2.5e-5: 9, 5e-5: 9, 7.5e-5: 18, 1e-4: 21}


def test_it_learns_a_simple_system_and_predicts_it() -> None:
    _, model = trained(SMALL)
    steps = pendulum(1000, seed=9)
    next_obs, reward, ended = model.predict(steps.obs, steps.action)
    assert (next_obs - steps.next_obs).abs().mean() < 0.03
    assert (reward - steps.reward).abs().mean() < 0.3
    assert not ended.any()
    assert model.version == 1


def test_it_learns_where_episodes_end() -> None:
    config = DynamicsConfig(model_hidden_sizes=(32, 32), num_models=4, num_elites=2, buffer_size=5000)
    _, model = trained(config)
    steps = pendulum(1000, seed=9)
    _, _, ended = model.predict(steps.obs, steps.action)
    right = ended == steps.terminated.bool()
    assert right.float().mean() > 0.95
    assert ended[steps.terminated.bool()].float().mean() > 0.8


def test_training_stops_when_nothing_gains_and_keeps_what_did_best() -> None:
    dynamics, _ = trained(SMALL, 400)
    before = [parameter.detach().clone() for parameter in dynamics.ensemble.parameters()]
    error = dynamics.holdout_error()
    for group in dynamics.optimizer.param_groups:
        group["lr"] = 0.0  # no gain is possible
    result = dynamics.fit(10_000)
    assert result.num_updates == (1 + 5) * dynamics.updates_per_epoch  # the first epoch counts in any case
    assert not result.diverged
    assert result.holdout_error == pytest.approx(error.sort().values[:2].mean().item())
    for old, new in zip(before, dynamics.ensemble.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_training_that_diverges_is_set_back_and_said() -> None:
    dynamics, _ = trained(SMALL, 400)
    error = dynamics.holdout_error()
    for group in dynamics.optimizer.param_groups:
        group["lr"] = 1e6
    result = dynamics.fit(200)
    assert result.diverged
    assert torch.equal(dynamics.holdout_error(), error)
    assert dynamics.optimizer.param_groups[0]["lr"] == SMALL.model_learning_rate
    assert not dynamics.fit(40).diverged


def test_each_network_keeps_its_own_best_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamics, _ = trained(SMALL, 200)
    for group in dynamics.optimizer.param_groups:
        group["lr"] = 0.004  # so high that errors go up and down, differently for each network
    seen: list[torch.Tensor] = []
    measure = dynamics.holdout_error

    def noted() -> torch.Tensor:
        seen.append(measure())
        return seen[-1]

    monkeypatch.setattr(dynamics, "holdout_error", noted)
    result = dynamics.fit(400)
    assert not result.diverged
    epochs = torch.stack(seen[1:])  # the first is from before the training
    kept = measure()
    assert len(set(epochs.argmin(dim=0).tolist())) > 1
    assert (kept <= epochs.min(dim=0).values / 0.99).all()
    assert (kept >= epochs.min(dim=0).values - 1e-6).all()


def test_a_good_model_still_learns_from_a_few_new_steps() -> None:
    dynamics, _ = trained(SMALL, 600)
    old, new = pendulum(2000), pendulum(20, seed=5)
    new = new._replace(obs=new.obs + 3, next_obs=new.next_obs + 3)  # where nobody has been, one step in a hundred
    steps = StepBatch(*(torch.cat(parts) for parts in zip(old, new, strict=True)))
    model = EliteModel(Ensemble.of(SMALL, SMALL.num_elites, 2, 1), SMALL.termination, 0)

    def error() -> float:
        dynamics.hand_over(model)
        return float((model.predict(new.obs, new.action)[0] - new.next_obs).abs().mean())

    before = error()
    for _ in range(3):
        dynamics.prepare(steps)
        dynamics.fit(300)
    assert error() < 0.5 * before


def test_each_elite_predicts_equally_many_rows_in_random_order() -> None:
    _, model = trained(SMALL, 50)
    for number, parameter in enumerate(model.ensemble.nets.biases[-1]):
        parameter.data.fill_(100.0 * number)  # tells the elites apart
    for weight in model.ensemble.nets.weights:
        weight.data.zero_()
    for bias in list(model.ensemble.nets.biases)[:-1]:
        bias.data.zero_()
    next_obs, _, _ = model.predict(torch.zeros(1000, 2), torch.zeros(1000, 1))
    second = next_obs[:, 0] > next_obs[:, 0].mean()
    assert second.sum() == 500
    assert 150 < second[:500].sum() < 350
    with pytest.raises(ValueError, match="cannot be shared out"):
        model.predict(torch.zeros(999, 2), torch.zeros(999, 1))


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        ("InvertedPendulum-v5", "inverted-pendulum"),
        ("Hopper-v5", "hopper"),
        ("Walker2d-v5", "walker2d"),
        ("Ant-v5", "ant"),
        ("Humanoid-v5", "humanoid"),
        ("HalfCheetah-v5", "never"),
    ],
)
def test_known_terminations_are_gymnasiums(env_id: str, name: str) -> None:
    env = gymnasium.make(env_id)
    env.action_space.seed(0)
    observations, ends = [], []
    env.reset(seed=0)
    for _ in range(300):
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        observations.append(obs)
        ends.append(terminated)
        if terminated or truncated:
            env.reset()
    env.close()
    rule = terminations.find(name)
    assert rule is not None
    assert rule(torch.from_numpy(np.array(observations)).float()).tolist() == ends


def test_an_unknown_termination_is_refused() -> None:
    with pytest.raises(UserError, match="choose learned, never"):
        DynamicsConfig(termination="hoper")
