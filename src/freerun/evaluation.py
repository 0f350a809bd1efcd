"""A trained policy on fresh episodes: its returns, and pictures of it at work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from freerun.algorithms.actor import MLPActor
from freerun.collectors.trials import TRIAL_SEED, Greedy, play
from freerun.config import TrainConfig
from freerun.core import EnvSpec, Policy, UserError
from freerun.envs import CYBER_ENVS, defenders
from freerun.envs.gymnasium import GymnasiumFactory
from freerun.envs.lane import Lane, Lanes
from freerun.envs.tensors import is_only_tensors
from freerun.making import make_factory, make_tensors
from freerun.persistence import checkpoint, origin
from freerun.persistence.run_folder import POLICY, RunFolder, read_policy
from freerun.persistence.secrecy import refuse_hidden
from freerun.registry import make_config
from freerun.resuming import settings_of

FRAME_MILLISECONDS = 40


@dataclass(frozen=True)
class Evaluation:
    returns: list[float]
    lengths: list[int]
    pictures: list[Path]

    def __str__(self) -> str:
        returns = np.array(self.returns)
        return (
            f"return {returns.mean():.2f} ± {returns.std():.2f} (min {returns.min():.2f}, "
            f"median {np.median(returns):.2f}, max {returns.max():.2f}), "
            f"length {np.mean(self.lengths):.1f}, over {len(returns)} episodes"
        )


@dataclass(frozen=True)
class Trained:
    """A policy's file and the settings of its run."""

    run_dir: Path
    config: dict[str, Any]
    policy_path: Path

    def settings(self, trust: Sequence[str]) -> TrainConfig[Any, Any]:
        """Of the run, for somebody who is about to run the code that they name."""
        origin.check(self.config, self.run_dir, trust)
        refuse_hidden(self.config)
        return make_config(self.config)

    @classmethod
    def find(cls, place: Path, which: str | None = None) -> Trained:
        """Of a run folder (as it ended; or its newest, best or named checkpoint), or of a checkpoint's own folder."""
        if checkpoint.NAME.fullmatch(place.name):
            return cls._of(place)
        if which is None and (place / POLICY).is_file():
            return cls(place, RunFolder.open(place).read_config(), place / POLICY)
        if which == "best":
            path = checkpoint.best(place)
            if path is None:
                raise UserError(f"{place} has no checkpoint whose score is known: leave --checkpoint out")
            return cls._of(path)
        if which in (None, "newest"):
            if not checkpoint.names(place):
                RunFolder.open(place)  # says what is missing
            return cls._of(checkpoint.newest(place).path)
        if not checkpoint.NAME.fullmatch(which):
            raise UserError(f"--checkpoint is best, newest or a name such as update-000000120, not {which!r}")
        return cls._of(checkpoint.folder_of(place) / which)

    @classmethod
    def _of(cls, path: Path) -> Trained:
        try:
            found = checkpoint.load(path)
        except checkpoint.Damaged as damage:
            raise UserError(f"{path} cannot be used: {damage}") from None
        run_dir = path.parent.parent
        return cls(run_dir, settings_of(found, run_dir), path / POLICY)


def load_policy(
    run_dir: str | Path, greedy: bool = True, checkpoint: str | None = None, trust: Sequence[str] = ()
) -> Policy:
    """The policy of a run, or of one of its checkpoints (best, newest, or by name).

    A network of somebody's own is code: if the run was not trained here by you, name it again with `trust`.
    """
    return _load(Trained.find(Path(run_dir), checkpoint), greedy, trust)


def _load(trained: Trained, greedy: bool, trust: Sequence[str], spec: EnvSpec | None = None) -> Policy:
    arrays, description = read_policy(trained.policy_path)
    policy: Policy
    if description.get("kind") == "torch":
        from freerun.algorithms.torch_actor import TorchActor

        config = trained.settings(trust)
        if description.get("network") != getattr(config.algorithm, "network", None):
            raise UserError(f"{trained.policy_path} is of another network than its run's settings say")
        policy = TorchActor.restore(arrays, description, spec or make_factory(config).spec)
    else:
        policy = MLPActor.restore(arrays, description)
    return Greedy(policy) if greedy else policy


def _check(num_episodes: int, seed: int | None) -> None:
    if num_episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {num_episodes}")
    if seed is not None and seed < 0:
        raise UserError(f"--seed must be 0 or more, not {seed}")


def evaluate(
    run_dir: str | Path,
    num_episodes: int = 10,
    seed: int | None = None,
    greedy: bool = True,
    render: Path | None = None,
    checkpoint: str | None = None,
    trust: Sequence[str] = (),
) -> Evaluation:
    _check(num_episodes, seed)
    trained = Trained.find(Path(run_dir), checkpoint)
    config = trained.settings(trust)
    if is_only_tensors(config.env):
        if render is not None:
            raise UserError(f"{config.env} draws no pictures for freerun: leave --render out")
        return _evaluate_tensors(trained, config, num_episodes, seed, greedy, trust)
    policy = _load(trained, greedy, trust)
    factory = make_factory(config)
    camera = _Camera(factory, render) if render is not None else None
    lane = camera.lane if camera else factory.make_lane()
    env = Lanes([lane])
    evaluation = Evaluation([], [], [])
    try:
        for segment in play(env, policy, TRIAL_SEED + config.seed if seed is None else seed, num_episodes):
            evaluation.returns.append(float(segment.reward.sum()))
            evaluation.lengths.append(segment.num_steps)
            if camera is not None:
                evaluation.pictures.append(camera.develop(len(evaluation.returns) - 1))
    finally:
        env.close()
    return evaluation


def _evaluate_tensors(
    trained: Trained,
    config: TrainConfig[Any, Any],
    num_episodes: int,
    seed: int | None,
    greedy: bool,
    trust: Sequence[str],
) -> Evaluation:
    from freerun.collectors.tensor_trials import play_tensors

    chosen = TRIAL_SEED + config.seed if seed is None else seed
    env = make_tensors(config, num_episodes, 1, chosen).envs[0]
    try:
        return Evaluation(*play_tensors(env, _load(trained, greedy, trust, env.spec), chosen), [])
    finally:
        env.close()


def compare(
    run_dir: str | Path,
    num_episodes: int = 10,
    seed: int | None = None,
    checkpoint: str | None = None,
    trust: Sequence[str] = (),
) -> dict[str, Evaluation]:
    """The trained defender and those that learn nothing, on the same episodes."""
    config = Trained.find(Path(run_dir), checkpoint).settings(trust)
    if config.env not in CYBER_ENVS:
        raise UserError(f"--compare is for cyber-defence environments: {' and '.join(CYBER_ENVS)}")
    lane = make_factory(config).make_lane()
    chosen = TRIAL_SEED + config.seed if seed is None else seed
    others = {}
    for name, defender in defenders.DEFENDERS.items():
        returns = defenders.play(lane, defender, chosen, num_episodes)
        others[name] = Evaluation(returns, [], [])
    lane.close()
    return {"trained": evaluate(run_dir, num_episodes, seed, checkpoint=checkpoint, trust=trust), **others}


class _Camera:
    """Films episodes as GIFs."""

    def __init__(self, factory: GymnasiumFactory, folder: Path):
        try:
            import PIL  # noqa: F401
        except ModuleNotFoundError:
            raise UserError("--render needs Pillow: pip install 'freerun[render]'") from None
        lane = factory.make_lane(render_mode="rgb_array")
        if lane.env.render_mode != "rgb_array":
            raise UserError("this environment draws no pictures (render_mode 'rgb_array'): leave --render out")
        self._film = gymnasium.wrappers.RenderCollection(lane.env, pop_frames=True)
        self.lane = Lane(self._film)
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder to --render") from None

    def develop(self, episode: int) -> Path:
        from PIL import Image

        frames: Any = self._film.render()
        pictures = [Image.fromarray(frame) for frame in frames]
        path = self._folder / f"episode-{episode}.gif"
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=FRAME_MILLISECONDS, loop=0)
        return path
