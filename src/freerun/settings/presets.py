"""Presets: settings that go together under a name, as in `freerun train --preset mbpo-hopper`. Flags override them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freerun.core import UserError


@dataclass(frozen=True)
class Preset:
    """Settings that go together, and one line about them for `freerun list`."""

    about: str
    settings: Mapping[str, Any]


def _mbpo(env: str, about: str, total_steps: int, target_entropy: float, termination: str, **more: Any) -> Preset:
    """Settings of MBPO as in its paper (Janner et al. 2019, appendix C) and its code, whose epochs have 1,000 steps.

    The last model steps that are kept are those of as many epochs as the code retains.
    """
    settings = {"env": env, "algo": "mbpo", "total_steps": total_steps, "learning_starts": 5000}
    settings |= {"target_entropy": target_entropy, "termination": termination, **more}
    return Preset(f"{env} with the settings of the MBPO paper: {about}", settings)


def _continuous(num_envs: int, num_collectors: int, max_queue_size: int, collection_batch_size: int) -> Preset:
    settings = {"mode": "continuous", "num_envs": num_envs, "num_collectors": num_collectors}
    settings |= {"max_queue_size": max_queue_size, "collection_batch_size": collection_batch_size}
    return Preset(f"mode continuous with {num_envs} environments in {num_collectors} collectors", settings)


PRESETS = {
    "defender": Preset(
        "a defender of the built-in network against B_line: beats restoring on sight in a minute",
        {
            "env": "freerun/NetworkDefence-v0",
            "total_episodes": 4000,
            "episodes_per_update": 40,
            "learning_rate": 2e-3,
            "minibatch_size": 500,
            "num_epochs": 5,
            "envs_per_worker": 4,
            "normalize_reward": True,
            "normalize_advantage": True,
            "anneal_learning_rate": True,
        },
    ),
    "rsl-rl": Preset(
        "PPO as RSL-RL sets it if nothing is configured, for environments that are tensors: after an ENV",
        {
            "algo": "ppo",
            "num_epochs": 5,
            "learning_rate": 1e-3,
            "desired_kl": 0.01,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "clip_range": 0.2,
            "value_clip": 0.2,
            "value_coef": 1.0,
            "entropy_coef": 0.01,
            "max_grad_norm": 1.0,
            "advantage_rows": "update",
            "hidden_sizes": (256, 256, 256),
            "activation": "elu",
            "normalize_obs": False,
            "normalize_reward": False,
        },
    ),
    "mbpo-inverted-pendulum": _mbpo(
        "InvertedPendulum-v5",
        "10 updates per step",
        5_000,
        -0.05,
        "inverted-pendulum",
        updates_per_step=10.0,
        learning_starts=500,
        model_steps_kept=250,  # its epochs are shorter
    ),
    "mbpo-hopper": _mbpo(
        "Hopper-v5",
        "rollouts grow to 15 steps",
        125_000,
        -1.0,
        "hopper",
        rollout_length=1,
        rollout_length_end=15,
        rollout_growth=(20_000, 150_000),
    ),
    "mbpo-walker2d": _mbpo("Walker2d-v5", "20 updates per step", 300_000, -3.0, "walker2d"),
    "mbpo-halfcheetah": _mbpo("HalfCheetah-v5", "40 updates per step", 400_000, -3.0, "never", updates_per_step=40.0),
    "mbpo-ant": _mbpo(
        "Ant-v5",
        "rollouts grow to 25 steps",
        300_000,
        -4.0,
        "ant",
        rollout_length=1,
        rollout_length_end=25,
        rollout_growth=(20_000, 100_000),
        env_args={"include_cfrc_ext_in_observation": False},
    ),
    "mbpo-humanoid": _mbpo(
        "Humanoid-v5",
        "rollouts grow to 25 steps, a wider model",
        300_000,
        -2.0,
        "humanoid",
        rollout_length=1,
        rollout_length_end=25,
        rollout_growth=(20_000, 300_000),
        steps_per_model_training=1000,
        rollouts_per_step=100.0,  # 100,000 at every training of the model
        model_steps_kept=5000,
        model_hidden_sizes=(400, 400, 400, 400),
        # Positions and velocities alone, as in the code's own environment.
        env_args={f"include_{part}_in_observation": False for part in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")},
    ),
    "mbpo-small": Preset(
        "MBPO with networks that a CPU can train: for small problems, after another preset or with an ENV",
        {
            "algo": "mbpo",
            "hidden_sizes": (64, 64),
            "learning_rate": 1e-3,
            "batch_size": 128,
            "model_hidden_sizes": (64, 64, 64),
            "learning_starts": 500,
            "updates_per_step": 5.0,
            "rollouts_per_step": 100.0,
            "model_updates_per_step": 2.0,
        },
    ),
    "mbpo-drone": Preset(
        "a drone that learns to hover from some 40,000 steps: MBPO, on tensors, with networks that a CPU can train",
        {
            "env": "freerun/RoughDrone-v0",
            "env_args": {"task": "hover"},
            "algo": "mbpo",
            "mode": "batch",
            "num_envs": 64,
            "total_steps": 50_000,
            "learning_starts": 3000,
            "termination": "rough-drone",
            "gamma": 0.98,
            "learning_rate": 1e-3,
            "batch_size": 128,
            "hidden_sizes": (64, 64),
            "updates_per_step": 2.0,
            "model_hidden_sizes": (64, 64, 64),
            "model_updates_per_step": 0.5,
            "rollouts_per_step": 40.0,
            # With less real data, the critics gave high values to states that no drone reaches.
            "real_share": 0.5,
        },
    ),
    "sumo-intersection": Preset(
        "the traffic light of a crossing in SUMO (freerun[sumo])",
        {"env": "sumo/Intersection-v0", "total_steps": 100_000},
    ),
    "grid2op-case14": Preset(
        "the operator of a power grid with 14 substations in grid2op (freerun[grid2op])",
        {"env": "grid2op/PowerGrid-v0", "total_steps": 200_000},
    ),
    "atari-breakout": Preset(
        "Breakout from pixels, with settings that are usual for Atari games (freerun[atari])",
        {
            "env": "ALE/Breakout-v5",
            "wrap": "atari",
            "total_steps": 10_000_000,
            "num_workers": 8,
            "max_lag": 0,  # with a lag of 1 returns begin to rise later (docs/images.md)
            "steps_per_update": 1024,
            "minibatch_size": 256,
            "num_epochs": 4,
            "learning_rate": 2.5e-4,
            "anneal_learning_rate": True,
            "clip_range": 0.1,
            "entropy_coef": 0.01,
        },
    ),
    "continuous-64": _continuous(64, 8, 2000, 512),
    "continuous-128": _continuous(128, 16, 4000, 1024),
    "continuous-256": _continuous(256, 32, 8000, 2048),
}


def settings_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of these presets. A later preset overrides an earlier one."""
    settings: dict[str, Any] = {}
    for name in names:
        if name not in PRESETS:
            # A typo is answered with the nearest name.
            close = difflib.get_close_matches(name, list(PRESETS), n=1)
            advice = f"did you mean {close[0]}?" if close else "`freerun list` names them"
            raise UserError(f"there is no preset {name!r}: {advice}")
        settings |= PRESETS[name].settings
    return settings
