"""PPO on images makes the same update as Stable-Baselines3's PPO with its CnnPolicy: the weights after it agree."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO as SB3PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from freerun.adapters.space_adapter import SpaceAdapter
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import Segment

NUM_STEPS, NUM_ENVS, MINIBATCH_SIZE, NUM_EPOCHS = 32, 4, 32, 2
# A learning rate at which some ratios leave the clip range in so few gradient steps.
LEARNING_RATE, CLIP_RANGE, ENTROPY_COEF, VALUE_COEF = 1e-3, 0.05, 0.01, 0.5


class Snow(gymnasium.Env[Any, Any]):
    """Random pixels and rewards. Every second episode is truncated, and the others terminate."""

    def __init__(self) -> None:
        # The Nature CNN turns 44 pixels into 2, so the order of its flat features counts.
        self.observation_space = spaces.Box(0, 255, (4, 44, 44), np.uint8)
        self.action_space = spaces.Discrete(4)
        self._num_episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._num_episodes += 1
        self._steps_left = int(self.np_random.integers(4, 12))
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps_left -= 1
        has_ended, is_cut = self._steps_left == 0, self._num_episodes % 2 == 0
        return self._look(), self.np_random.normal(), has_ended and not is_cut, has_ended and is_cut, {}

    def _look(self) -> Any:
        return self.np_random.integers(0, 256, (4, 44, 44), np.uint8)


class Recorder(BaseCallback):
    """Keeps every step as freerun's segments hold it: with rewards before Stable-Baselines3 adds the value of a
    truncated episode's end to them."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        seen, infos = self.locals, self.locals["infos"]
        truncated = np.array([info["TimeLimit.truncated"] for info in infos])
        final_obs = [info.get("terminal_observation", row) for info, row in zip(infos, seen["new_obs"], strict=True)]
        step = {
            "obs": seen["obs_tensor"].numpy(),
            "action": seen["actions"],
            "log_prob": seen["log_probs"].numpy(),
            "reward": seen["rewards"],
            "terminated": seen["dones"] & ~truncated,
            "truncated": truncated,
            "next_obs": final_obs,
            "version": np.zeros(NUM_ENVS, np.int64),
            "episode": np.zeros(NUM_ENVS, np.int64),
        }
        self._steps.append({name: np.array(array) for name, array in step.items()})
        return True

    def segments(self) -> list[Segment]:
        """A segment of each environment."""
        columns = {name: np.stack([step[name] for step in self._steps]) for name in self._steps[0]}
        of_envs = [{name: array[:, [env]] for name, array in columns.items()} for env in range(NUM_ENVS)]
        return [Segment(**arrays, seconds=0.0) for arrays in of_envs]


def sb3_ppo() -> SB3PPO:
    return SB3PPO(
        "CnnPolicy",
        DummyVecEnv([Snow] * NUM_ENVS),
        n_steps=NUM_STEPS,
        batch_size=MINIBATCH_SIZE,
        n_epochs=NUM_EPOCHS,
        learning_rate=LEARNING_RATE,
        clip_range=CLIP_RANGE,
        ent_coef=ENTROPY_COEF,
        vf_coef=VALUE_COEF,
        seed=3,
        device="cpu",
    )


def our_ppo() -> PPO:
    env = Snow()
    config = PPOConfig(
        steps_per_update=NUM_STEPS * NUM_ENVS,
        minibatch_size=MINIBATCH_SIZE,
        num_epochs=NUM_EPOCHS,
        learning_rate=LEARNING_RATE,
        clip_range=CLIP_RANGE,
        entropy_coef=ENTROPY_COEF,
        value_coef=VALUE_COEF,
        normalize_reward=False,
    )
    spec = SpaceAdapter(env.observation_space, env.action_space).spec
    return PPO(spec, config, seed=1, device="cpu", deterministic=False)


def weights_of(model: SB3PPO) -> dict[str, torch.Tensor]:
    """Stable-Baselines3's weights by the names of ours."""
    theirs = model.policy.state_dict()
    names = {f"convolutions.{layer}": f"features_extractor.cnn.{2 * layer}" for layer in range(3)}
    names["linear"] = "features_extractor.linear.0"
    found: dict[str, torch.Tensor] = {}
    for part in ("weight", "bias"):
        found |= {f"trunk.encoders.0.{ours}.{part}": theirs[f"{name}.{part}"] for ours, name in names.items()}
    # Features are flattened with channels last here, and with channels first there.
    linear = found["trunk.encoders.0.linear.weight"]
    found["trunk.encoders.0.linear.weight"] = linear.view(-1, 64, 2, 2).permute(0, 2, 3, 1).flatten(1)
    weights = {f"{network}.{name}": array for network in ("actor", "critic") for name, array in found.items()}
    for network, name in (("actor", "action_net"), ("critic", "value_net")):
        weights |= {f"{network}.head.0.{part}": theirs[f"{name}.{part}"] for part in ("weight", "bias")}
    return {name: array.clone() for name, array in weights.items()}


def test_first_weights_have_the_same_norms() -> None:
    theirs = weights_of(sb3_ppo())
    ours = dict(our_ppo().net.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        # Orthogonal weights have the norm gain * sqrt(rows or columns, whichever is fewer).
        assert weight.norm().item() == pytest.approx(theirs[name].norm().item(), rel=1e-3), name


def test_an_update_leads_to_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ppo, recorder = sb3_ppo(), our_ppo(), Recorder()
    first = weights_of(model)
    ppo.net.load_state_dict({**ppo.net.state_dict(), **first})
    # Both lay out the rows of one environment after those of another, but draw minibatches in orders of their own.
    shuffle = torch.Generator().set_state(ppo.state_dict()["shuffle"])
    orders = [torch.randperm(NUM_STEPS * NUM_ENVS, generator=shuffle).numpy() for _ in range(NUM_EPOCHS)]
    monkeypatch.setattr(np.random, "permutation", lambda num_rows: orders.pop(0))

    model.learn(NUM_STEPS * NUM_ENVS, recorder)
    segments = recorder.segments()
    ppo.observe(segments)
    metrics = ppo.update(version=0, progress=0.0)

    assert not orders
    assert any(segment.terminated.any() for segment in segments)
    assert any(segment.truncated.any() for segment in segments)
    assert metrics["num_gradient_steps"] == NUM_EPOCHS * NUM_STEPS * NUM_ENVS / MINIBATCH_SIZE
    assert 0 < metrics["clip_fraction"] < 1
    logged = model.logger.name_to_value
    assert metrics["value_loss"] == pytest.approx(logged["train/value_loss"], rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(logged["train/clip_fraction"], abs=1e-6)
    assert metrics["explained_variance"] == pytest.approx(logged["train/explained_variance"], abs=1e-4)
    ours, theirs = ppo.net.state_dict(), weights_of(model)
    for name, weight in theirs.items():
        moved = (weight - first[name]).abs().max().item()
        difference = (ours[name] - weight).abs().max().item()
        assert moved > 1e-4, name
        assert difference < 0.01 * moved, f"{name}: differs by {difference:.2g} after it has moved by {moved:.2g}"
