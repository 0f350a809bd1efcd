"""Masks of discrete actions: choices that are ruled out have no probability, no part in the entropy and no gradient."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import freerun
from freerun.adapters.tensor_envs import TensorEnvs
from freerun.algorithms.policies.action_heads import MASKED_LOGIT, mask_logits
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.networks import categorical_entropy, categorical_log_prob, masked_logits
from freerun.algorithms.ppo.gradient_steps import CategoricalGradient
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import Array, EnvSpec, ObsGroups, Segment, mask_space

VALUES = spaces.Box(-np.inf, np.inf, (5,), np.float32)
ACTIONS: dict[str, spaces.Discrete | spaces.MultiDiscrete] = {
    "discrete": spaces.Discrete(4),
    "many-choices": spaces.Discrete(145),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 4]),
}
# One observation number, two discrete actions with 3 and 2 choices. Of the first, the second choice is ruled out.
ROW = np.array([[7.0, 1.0, 0.0, 1.0, 1.0, 1.0]], np.float32)
LOGITS = np.array([[math.log(2), 50.0, 0.0, 0.0, 0.0]], np.float32)
CATEGORIES = (3, 2)


def spec_of(actions: spaces.Discrete | spaces.MultiDiscrete, critic: spaces.Box | None = None) -> EnvSpec:
    return EnvSpec.of_groups(ObsGroups(VALUES, critic, mask_space(actions)), actions, reports_final_obs=True)


def sizes_of(env: EnvSpec) -> list[int]:
    space: Any = env.action_space
    return [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()


def rows_of(env: EnvSpec, rng: np.random.Generator, num_rows: int) -> Array:
    """Random observations with random masks, each of which allows something."""
    assert env.obs_groups is not None
    sizes = sizes_of(env)
    size = math.prod(env.observation_space.shape) - sum(sizes)
    mask = rng.random((num_rows, sum(sizes))) < 0.5
    first = 0
    for number in sizes:
        mask[np.arange(num_rows), first + rng.integers(number, size=num_rows)] = True
        first += number
    return np.concatenate([rng.standard_normal((num_rows, size)), mask], axis=1, dtype=np.float32)


def is_allowed(env: EnvSpec, rows: Array, action: Array) -> bool:
    sizes = sizes_of(env)
    mask = rows[:, -sum(sizes) :]
    columns = action.reshape(len(rows), -1) + np.cumsum([0, *sizes[:-1]])
    return bool(np.take_along_axis(mask, columns, axis=1).all())


# ---------------------------------------------------------------------------------------------- numbers by hand


def test_log_probabilities_and_entropy_are_of_what_is_left() -> None:
    # What is left of the first action has odds 2 : 1, so p = 2/3, 1/3. The second action is a fair coin.
    logits = masked_logits(torch.from_numpy(LOGITS), torch.from_numpy(ROW))
    action = torch.tensor([[2, 1]])
    assert categorical_log_prob(logits, CATEGORIES, action).item() == pytest.approx(math.log(1 / 3) + math.log(1 / 2))
    # H = -(2/3 log 2/3 + 1/3 log 1/3) + log 2 = 0.636514 + 0.693147
    assert categorical_entropy(logits, CATEGORIES).item() == pytest.approx(1.329661, abs=1e-6)
    numpy_logits = LOGITS.copy()
    mask_logits(numpy_logits, ROW)
    np.testing.assert_array_equal(numpy_logits, logits.numpy())
    assert numpy_logits[0, 1] == MASKED_LOGIT
    assert CategoricalGradient(CATEGORIES).log_prob(numpy_logits, action.numpy())[0] == pytest.approx(math.log(1 / 6))


def test_gradients_by_hand() -> None:
    # d log p(a) / dx_j = [j = a] - p_j:  first action, a = 2: (-2/3, 0, 1 - 1/3);  second, a = 1: (-1/2, 1 - 1/2).
    # dH / dx_j = -p_j (log p_j + H):  -2/3 (log 2/3 + 0.636514) = -0.154033, and the opposite for the other; coin: 0.
    of_log_prob = [-2 / 3, 0.0, 2 / 3, -1 / 2, 1 / 2]
    of_entropy = [-0.154033, 0.0, 0.154033, 0.0, 0.0]
    entropy_weight = 0.1
    expected = np.array(of_log_prob) - entropy_weight * np.array(of_entropy)
    action = torch.tensor([[2, 1]])

    logits = torch.from_numpy(LOGITS).requires_grad_()
    masked = masked_logits(logits, torch.from_numpy(ROW))
    entropy = categorical_entropy(masked, CATEGORIES)
    loss = categorical_log_prob(masked, CATEGORIES, action) - entropy_weight * entropy
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy()[0], expected, atol=1e-6)
    assert logits.grad[0, 1] == 0

    written_out = CategoricalGradient(CATEGORIES)
    output = LOGITS.copy()
    mask_logits(output, ROW)
    written_out.log_prob(output, action.numpy())
    gradient = written_out.backward(np.ones(1, np.float32), entropy_weight)
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)
    assert gradient[0, 1] == 0


# ---------------------------------------------------------------------------------------------- actors


@pytest.mark.parametrize("normalize_obs", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS.keys())
def test_all_ways_to_act_keep_to_the_mask_and_agree(
    actions: spaces.Discrete | spaces.MultiDiscrete, batch_invariant: bool, normalize_obs: bool
) -> None:
    env, rng = spec_of(actions), np.random.default_rng(0)
    spec = ActorSpec.of(env, (8,), "tanh", normalize_obs)
    assert (spec.obs_size, spec.has_mask) == (5, True)
    actor = MLPActor(spec, isinstance(actions, spaces.Discrete), batch_invariant)
    actor.load(rng.standard_normal(len(actor.weights), np.float32))
    rows = rows_of(env, rng, 500)
    noise = actor.draw(rng, len(rows))
    decision = actor.act(rows, noise)
    assert is_allowed(env, rows, decision.action)
    assert is_allowed(env, rows, actor.act(rows, None).action)
    log_prob = actor.log_prob(decision.head, decision.action)
    assert np.isfinite(log_prob).all()
    single, head = actor.single(), np.zeros(actor.head_size, np.float32)
    for row in range(100):
        np.testing.assert_array_equal(single(rows[row], noise[row], head), decision.action[row])
        np.testing.assert_allclose(head, decision.head[row], rtol=1e-5, atol=1e-5)
    on_device = actor.on(torch.device("cpu"), 0)
    action, device_log_prob = on_device.act(torch.from_numpy(rows))
    assert is_allowed(env, rows, action.numpy())
    np.testing.assert_allclose(actor.log_prob(decision.head, action.numpy()), device_log_prob, atol=1e-4)


def test_what_is_sampled_follows_the_probabilities_of_what_is_left() -> None:
    """2 : 1, as above, by Gumbel noise and by the cumulative distribution."""
    for num_choices in (3, 80):
        env = EnvSpec.of_groups(
            ObsGroups(spaces.Box(0, 1, (1,), np.float32), None, mask_space(spaces.Discrete(num_choices))),
            spaces.Discrete(num_choices),
            reports_final_obs=True,
        )
        actor = MLPActor(ActorSpec.of(env, (), "tanh"), scalar_actions=True)
        actor.arrays["0.bias"][:3] = LOGITS[0, :3]
        actor.load(actor.weights.copy())
        row = np.zeros((1, 1 + num_choices), np.float32)
        row[0, [1, 3]] = 1
        rows = np.repeat(row, 3000, axis=0)
        chosen = actor.act(rows, actor.draw(np.random.default_rng(0), 3000)).action
        assert set(chosen.tolist()) == {0, 2}
        assert (chosen == 0).mean() == pytest.approx(2 / 3, abs=0.03)


# ---------------------------------------------------------------------------------------------- learners


def segment(ppo: PPO, env: EnvSpec, rng: np.random.Generator, version: int, num_steps: int = 200) -> Segment:
    obs = rows_of(env, rng, num_steps)
    decision = ppo.policy.act(obs, ppo.policy.draw(rng, num_steps))
    log_prob = ppo.policy.log_prob(decision.head, decision.action)
    ended = np.zeros((num_steps, 1), np.bool_)
    ended[-1] = True
    numbers = np.full((num_steps, 1), version, np.int64)
    reward = rng.standard_normal((num_steps, 1), np.float32) + obs[:, :1]
    columns = (obs[:, None], decision.action[:, None], log_prob[:, None], reward, ended, np.zeros_like(ended))
    return Segment(*columns, np.roll(obs, -1, axis=0)[:, None], numbers, numbers, 0.1)


def learned(env: EnvSpec, lag: int, **settings: Any) -> tuple[PPO, dict[str, float]]:
    ppo = PPO(env, PPOConfig(minibatch_size=20, num_epochs=5, **settings), 0, "cpu", False)
    rng, metrics = np.random.default_rng(1), {}
    for version in range(lag, lag + 2):
        ppo.observe([segment(ppo, env, rng, version - lag)])
        metrics = dict(ppo.update(version, 0.0))
    return ppo, metrics


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("settings", [{"entropy_coef": 0.05}, {"normalize_obs": True, "lag_correction": "vtrace"}])
@pytest.mark.parametrize("critic", [None, spaces.Box(-1, 1, (2,), np.float32)], ids=["plain", "critic-group"])
@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS.keys())
def test_both_learners_end_at_the_same_weights(
    actions: spaces.Discrete | spaces.MultiDiscrete, critic: spaces.Box | None, settings: dict[str, Any], lag: int
) -> None:
    env = spec_of(actions, critic)
    torch_one, torch_metrics = learned(env, lag, learner="torch", **settings)
    for learner in ("fast", "numpy"):  # in C where there is a compiler, and in numpy
        fast, fast_metrics = learned(env, lag, learner=learner, **settings)
        for name, weight in fast.net.state_dict().items():
            torch.testing.assert_close(weight, torch_one.net.state_dict()[name], atol=5e-5, rtol=1e-3)
        assert fast_metrics == pytest.approx(torch_metrics, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"network": "toy_networks:linear"}], ids=["mlp", "own-network"])
def test_the_learner_gives_the_probabilities_that_the_actor_gave(settings: dict[str, Any]) -> None:
    env, rng = spec_of(ACTIONS["multi-discrete"]), np.random.default_rng(3)
    ppo, _ = learned(env, 0, normalize_obs=True, **settings)
    rows = rows_of(env, rng, 50)
    decision = ppo.policy.act(rows, ppo.policy.draw(rng, 50))
    assert is_allowed(env, rows, decision.action)
    with torch.no_grad():
        head = ppo.net.head(ppo.net.normalize(torch.from_numpy(rows)))
        log_prob = ppo.net.log_prob(head, torch.from_numpy(decision.action))
    np.testing.assert_allclose(log_prob, ppo.policy.log_prob(decision.head, decision.action), atol=1e-5)


def test_masks_are_not_normalised_and_no_network_sees_them() -> None:
    env = spec_of(ACTIONS["discrete"])
    ppo, _ = learned(env, 0, normalize_obs=True)
    assert ppo.net.obs_mean[-4:].tolist() == [0.0] * 4
    assert ppo.net.obs_scale[-4:].tolist() == [1.0] * 4
    assert (ppo.net.obs_mean[:5] != 0).all()
    rows = torch.from_numpy(rows_of(env, np.random.default_rng(5), 20))
    others = rows.clone()
    others[:, -4:] = 1.0
    with torch.no_grad():
        assert torch.equal(ppo.net.value(rows), ppo.net.value(others))
        heads, other_heads = ppo.net.head(rows), ppo.net.head(others)
    is_free = rows[:, -4:] == 1
    assert torch.equal(heads[is_free], other_heads[is_free])
    assert (heads[~is_free] == MASKED_LOGIT).all()


# ---------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("mode", ["sync", "batch"])
def test_simulators_on_a_device_may_have_masks(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.adapters.tensor_envs.TENSOR_ENVS", {"toy": "toy_tensors:build_masked"})
    settings: dict[str, Any] = {"num_envs": 8, "num_steps_per_env": 20, "total_steps": 160 * 3, "quiet": True}
    freerun.train("toy", mode=mode, run_dir=tmp_path / "run", **settings)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["simulator/forbidden"] == 0
    assert 0 < records[-1]["entropy"] <= math.log(2) + 1e-6  # two of three choices are left


def test_tensor_environments_can_be_cut_down_to_what_an_algorithm_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.adapters.tensor_envs.TENSOR_ENVS", {"toy": "toy_tensors:build_masked"})
    whole, cut = (TensorEnvs("toy", 2, 1, "cpu", 0, {}, True, ignore_masks=ignore) for ignore in (False, True))
    assert (whole.hides_masks, cut.hides_masks, whole.hides_critic_group) == (False, True, False)
    assert (whole.spec.has_mask, cut.spec.has_mask) == (True, False)
    assert torch.equal(cut.envs[0].reset(), whole.envs[0].reset()[:, :3])
    groups = ObsGroups(VALUES, VALUES, mask_space(ACTIONS["discrete"]))
    env = EnvSpec.of_groups(groups, ACTIONS["discrete"], reports_final_obs=True)
    assert env.observation_space.shape == (14,)
    assert env.cut_down(keeps_critic=False, keeps_mask=True).observation_space.shape == (9,)
    assert env.cut_down(keeps_critic=True, keeps_mask=False).obs_groups == ObsGroups(VALUES, VALUES)
    assert env.cut_down(keeps_critic=False, keeps_mask=False) == EnvSpec(VALUES, ACTIONS["discrete"])
