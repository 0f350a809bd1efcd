"""Plays fresh episodes with a trained policy, and films them if wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freerun.adapters.catalog import ENV_SETTINGS
from freerun.adapters.env_adapter import SerialEnvs
from freerun.adapters.tensor_envs import is_only_tensors
from freerun.collecting.rollouts.evaluation_episodes import greedy, play
from freerun.core import EnvSpaces, HeldOutSeed, Policy, Purpose, UserError, episode_seed
from freerun.run.deployment import SavedPolicy
from freerun.run.filming import Camera
from freerun.run.trained_policy import TrainedPolicy
from freerun.settings.config import AnyConfig
from freerun.settings.env_flags import settings_class
from freerun.settings.factories import make_factory, make_tensors


@dataclass(frozen=True)
class Evaluation:
    """The results of episodes, in the order in which they were played."""

    returns: list[float]
    lengths: list[int]
    pictures: list[Path]
    """The film of each episode, if films were wanted."""

    @property
    def mean(self) -> float:
        """The mean of the returns."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """The standard deviation of the returns."""
        return float(np.std(self.returns))

    def __str__(self) -> str:
        returns = np.array(self.returns)
        return (
            f"return {self.mean:.2f} ± {self.std:.2f} (min {returns.min():.2f}, "
            f"median {np.median(returns):.2f}, max {returns.max():.2f}), "
            f"length {np.mean(self.lengths):.1f}, over {len(returns)} episodes"
        )


def _check(num_episodes: int, seed: int | None) -> None:
    if num_episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {num_episodes}")
    if seed is not None and seed < 0:
        raise UserError(f"--seed must be 0 or more, not {seed}")


def _seed(config: AnyConfig, seed: int | None) -> HeldOutSeed:
    """Return the seed of the episodes to play. They are never those of training or of --eval-every."""
    return HeldOutSeed(config.seed if seed is None else seed, Purpose.EVALUATION)


def evaluate(
    policy: str | Path | TrainedPolicy,
    episodes: int = 10,
    seed: int | None = None,
    deterministic: bool = True,
    render: str | Path | None = None,
    checkpoint: str | None = None,
    trust: Sequence[str] = (),
    view: str | None = None,
) -> Evaluation:
    """Play episodes with a trained policy: the folder of its run, or what `load_policy` and `train` return.

    `deterministic=False` samples actions as in training; `render` is a folder to film every episode in,
    `view` how the films show it, for environments that can be seen in several ways.
    """
    _check(episodes, seed)
    if view is not None and render is None:
        raise UserError("--view says how --render films the episodes: give --render, too")
    source = _source(policy, checkpoint)
    config = source.settings(trust)
    make_actor = functools.partial(_actor, source, deterministic, trust)
    if is_only_tensors(config.env):
        if render is not None:
            raise UserError(f"{config.env} draws no pictures for freerun: leave --render out")
        return play_at_once(config, episodes, _seed(config, seed), make_actor)
    factory = make_factory(config)
    actor = make_actor(factory.spaces)
    camera = Camera(factory, Path(render), view) if render is not None else None
    # One environment: a film shows one episode after another.
    env = SerialEnvs([camera.env if camera else factory.make_one()])
    evaluation = Evaluation([], [], [])
    try:
        for segment in play(env, actor, _seed(config, seed), episodes):
            evaluation.returns.append(float(segment.reward.sum()))
            evaluation.lengths.append(segment.num_steps)
            if camera is not None:
                evaluation.pictures.append(camera.save())
    finally:
        env.close()
        if camera is not None:
            camera.close()
    return evaluation


def _source(policy: str | Path | TrainedPolicy, checkpoint: str | None) -> SavedPolicy | TrainedPolicy:
    if isinstance(policy, str | Path):
        return SavedPolicy.find(Path(policy), checkpoint)
    if not isinstance(policy, TrainedPolicy):
        raise UserError(f"name the folder of a run, or give the policy of one, not a {type(policy).__name__}")
    if checkpoint is not None:
        raise UserError("a checkpoint is chosen in the folder of a run, and this is a policy already: leave it out")
    return policy


def _actor(
    source: SavedPolicy | TrainedPolicy, deterministic: bool, trust: Sequence[str], env_spaces: EnvSpaces
) -> Policy:
    policy = source.load(trust, env_spaces=env_spaces) if isinstance(source, SavedPolicy) else source
    return greedy(policy.actor) if deterministic else policy.actor


def play_at_once(
    config: AnyConfig, num_episodes: int, seed: HeldOutSeed, make_actor: Callable[[EnvSpaces], Policy]
) -> Evaluation:
    """Play one episode in each of so many environments that are tensors, all at the same time."""
    from freerun.collecting.tensors.tensor_rollout import play_tensors

    # Environments that are tensors are seeded once for all, not per episode.
    simulator_seed = episode_seed(seed, 0)
    made = make_tensors(config, num_episodes, 1, simulator_seed)
    try:
        return Evaluation(*play_tensors(made.envs[0], make_actor(made.spaces), simulator_seed), [])
    finally:
        made.envs[0].close()


def compare(
    run_dir: str | Path,
    episodes: int = 10,
    seed: int | None = None,
    checkpoint: str | None = None,
    trust: Sequence[str] = (),
) -> dict[str, Evaluation]:
    """Play the same episodes with the trained policy and with the environment's baselines, which learn nothing."""
    config = SavedPolicy.find(Path(run_dir), checkpoint).settings(trust)
    baselines = config.env_settings.baselines()
    if not baselines:
        able = [name for name in ENV_SETTINGS if settings_class(name)().baselines()]
        raise UserError(f"--compare needs an environment with baseline policies: {' or '.join(able)}")
    env = make_factory(config).make_one()
    others = {}
    for name, baseline in baselines.items():
        others[name] = Evaluation(baseline(env, _seed(config, seed), episodes), [], [])
    env.close()
    return {"trained": evaluate(run_dir, episodes, seed, checkpoint=checkpoint, trust=trust), **others}
