"""Every kind of policy, as the smallest training that makes one: contract tests run over this table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ON_POLICY: dict[str, Any] = {"episodes_per_update": 3, "minibatch_size": 32, "num_epochs": 1}
OFF_POLICY: dict[str, Any] = {"steps_per_update": 30, "learning_starts": 40, "batch_size": 8, "updates_per_step": 0.2}
SMALL_MODEL: dict[str, Any] = {
    "model_hidden_sizes": (8,),
    "num_models": 2,
    "num_elites": 1,
    "rollouts_per_step": 2.0,
    "model_updates_per_step": 0.1,
}


@dataclass(frozen=True)
class PolicyKind:
    """A training in updates of some 30 steps, for 12 episodes or fewer."""

    env: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Besides those of all kinds."""
    env_args: dict[str, Any] = field(default_factory=dict)
    workers_need_torch: bool = False
    """True where numpy cannot run the network: workers take a second to import torch, so tests start few of them."""

    @property
    def algo(self) -> str:
        return str(self.settings.get("algo", "ppo"))

    def train_settings(self) -> dict[str, Any]:
        """All settings of `freerun.train` but for the mode and the steps."""
        sizes = ON_POLICY if self.algo == "ppo" else OFF_POLICY
        common = {"env": self.env, "env_args": self.env_args, "hidden_sizes": (8,), "seed": 5, "quiet": True}
        return {**common, **sizes, **self.settings}


PENDULUM: dict[str, Any] = {"max_episode_steps": 10}
IMAGES: dict[str, Any] = {"minibatch_size": 64}
KINDS: dict[str, PolicyKind] = {
    "discrete": PolicyKind("toy_envs:OneBit"),
    "multidiscrete": PolicyKind("toy_envs:OneBit", {"activation": "relu"}, {"kind": "multidiscrete"}),
    "box": PolicyKind("toy_envs:OneBit", {"normalize_obs": True}, {"kind": "box"}),
    "dict": PolicyKind("many_parts_env:ManyParts", {"normalize_obs": True}),
    "masked": PolicyKind("toy_envs:Masked", {"entropy_coef": 0.01, "normalize_obs": True}, {"masks": "observation"}),
    "masked-pairs": PolicyKind("toy_envs:Masked", env_args={"kind": "multidiscrete"}),
    "gru": PolicyKind("freerun/TMaze-v0", {"memory": "gru", "memory_size": 8, "sequence_steps": 5, "burn_in": 2}),
    "lstm": PolicyKind("Pendulum-v1", {**PENDULUM, "memory": "lstm", "memory_size": 8, "sequence_steps": 7}),
    "masked-gru": PolicyKind("toy_envs:Masked", {"memory": "gru", "memory_size": 8}, {"kind": "multidiscrete"}),
    "critic-group": PolicyKind("toy_envs:Privileged", {"normalize_obs": True}),
    "critic-group-lstm": PolicyKind("toy_envs:Privileged", {"memory": "lstm", "memory_size": 8}),
    "small-cnn": PolicyKind("image_envs:FallingBall", IMAGES),
    "nature": PolicyKind("image_envs:FallingBall", IMAGES, {"size": 36}),
    "stacked-frames": PolicyKind("image_envs:stacked_balls", IMAGES),
    "combined": PolicyKind("image_envs:FallingBall", {**IMAGES, "normalize_obs": True}, {"kind": "sensor"}),
    "masked-cnn": PolicyKind("image_envs:FallingBall", IMAGES, {"kind": "masked"}),
    "impala": PolicyKind(
        "image_envs:FallingBall", {**IMAGES, "network": "impala"}, {"kind": "sensor"}, workers_need_torch=True
    ),
    "own": PolicyKind(
        "toy_envs:Privileged", {"network": "toy_networks:layered"}, {"num_actions": 2}, workers_need_torch=True
    ),
    "own-cnn": PolicyKind("toy_envs:Square", {"network": "toy_networks:cnn"}, workers_need_torch=True),
    "masked-own": PolicyKind("toy_envs:MaskedByMethod", {"network": "toy_networks:layered"}, workers_need_torch=True),
    "sac": PolicyKind("Pendulum-v1", {**PENDULUM, "algo": "sac"}),
    "fastsac": PolicyKind("Pendulum-v1", {**PENDULUM, "algo": "fastsac", "actor_layer_norm": True}),
    "td3": PolicyKind("Pendulum-v1", {**PENDULUM, "algo": "fastsac", "policy": "deterministic"}),
    "dqn": PolicyKind("toy_envs:OneBit", {"algo": "dqn", "epsilon_steps": 60}),
    "masked-dqn": PolicyKind("toy_envs:Masked", {"algo": "dqn", "epsilon_steps": 60}, {"kind": "many"}),
    "mbpo": PolicyKind("Pendulum-v1", {**PENDULUM, "algo": "mbpo", **SMALL_MODEL}),
    "mbpo-fast": PolicyKind("Pendulum-v1", {**PENDULUM, "algo": "mbpo", "agent": "fast", **SMALL_MODEL}),
}
