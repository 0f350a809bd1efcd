"""A trained policy to act with. It turns an observation of its environment into an action for `env.step`, in numpy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from gymnasium import spaces

from freerun.adapters.space_adapter import POLICY_GROUP, SpaceAdapter, has_groups, policy_part
from freerun.adapters.tensor_envs import is_only_tensors
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.core import Array, EnvSpaces, EnvSpec, FloatArray, Policy, UserError
from freerun.persistence import checkpoint
from freerun.persistence.run_folder import POLICY, PolicyFile, RunFolder, read_policy
from freerun.run.resume import settings_of
from freerun.settings.config import AnyConfig
from freerun.settings.factories import make_factory
from freerun.settings.named_code import trusted_config
from freerun.settings.registry import find_algorithm

if TYPE_CHECKING:
    from freerun.algorithms.policies.torch_actor import TorchActor

SIZES = ("obs_size", "categories", "gaussian_size")
"""The sizes that a network and its environment must share."""
Settings = Callable[[Sequence[str]], AnyConfig]
"""Returns the settings of a policy's run, for a list of code that the user trusts."""


class TrainedPolicy:
    """Takes observations as the environment gives them, and returns actions as the environment takes them.

    It flattens and normalises observations, and clips or scales actions, as training did.
    """

    def __init__(self, actor: Policy, env_spaces: EnvSpaces, settings: Settings, seed: int | None = None):
        self.actor = actor
        """The policy as workers use it. It takes flat observations, and its actions are not clipped yet."""
        self._has_groups = has_groups(env_spaces.observation)
        self.observation_space, self.action_space = policy_part(env_spaces.observation), env_spaces.action
        self.settings = settings
        self._rng = np.random.default_rng(seed)

    @functools.cached_property
    def _adapter(self) -> SpaceAdapter:
        return SpaceAdapter(self.observation_space, self.action_space)

    @property
    def weights(self) -> FloatArray:
        """All weights and normaliser statistics in one flat array."""
        return self.actor.weights

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Return the action for one observation, or the actions for a batch, which has one more axis in front.

        With `deterministic=False`, actions are sampled as in training.
        """
        rows, is_batch = self._read(obs)
        noise = None if deterministic else self.actor.draw(self._rng, len(rows))
        actions: Any = self.actor.act(rows, noise).action if len(rows) else ()
        convert = self._adapter.convert_action
        # Clip to the range of the action space (PPO) or scale to it (SAC), and count choices from the space's start.
        converted = [convert(action) for action in actions] if convert is not None else list(actions)
        if is_batch:
            space = self.action_space
            return np.array(converted, space.dtype).reshape(len(converted), *(space.shape or ()))
        # A plain int for a Discrete space, as docs/deploy.md promises.
        return int(converted[0]) if isinstance(self.action_space, spaces.Discrete) else converted[0]

    __call__ = predict

    def act(self, *_: object, **__: object) -> NoReturn:
        raise UserError("a trained policy has no act(): call policy.predict(obs), with one observation or a batch")

    def _read(self, obs: Any) -> tuple[Array, bool]:
        """Return the observations as rows for the actor, and whether they were a batch."""
        adapter, space = self._adapter, self.observation_space
        if self._has_groups:
            obs = _policy_group(obs)
        shape = adapter.spec.observation_space.shape
        try:
            if isinstance(space, spaces.Box):  # the usual case, without a loop over the rows of a batch
                batch = adapter.read(obs)
                is_batch = batch.shape != shape
                rows = batch if is_batch else batch[None]
            else:
                elements = _elements(space, obs)
                is_batch = elements is not None
                found = [adapter.read(element) for element in ([obs] if elements is None else elements)]
                rows = np.array(found, adapter.spec.observation_space.dtype).reshape(len(found), *shape)
            if rows.shape[1:] != shape:
                raise ValueError(f"its shape is {rows.shape}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"the policy takes an observation of {space}, or a batch of them with one more axis in front; "
                f"this is neither: {reason}"
            ) from None
        return rows, is_batch


def _policy_group(obs: Any) -> Any:
    """What the policy sees of one observation or of a batch, which need not hold what only the value function sees."""
    if isinstance(obs, list | tuple):
        return [_policy_group(element) for element in obs]
    return obs[POLICY_GROUP] if isinstance(obs, Mapping) and POLICY_GROUP in obs else obs


def _elements(space: spaces.Space[Any], value: Any) -> list[Any] | None:
    """Return the elements of a batch; None for a single element. A batch of dictionaries may also be a dictionary of
    batches."""
    # A dictionary of batches becomes a list of dictionaries, one per element of the batch.
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        parts = [_elements(space[name], value[name]) for name in space]
        rows = _zipped(parts)
        return None if rows is None else [dict(zip(space, row, strict=True)) for row in rows]
    if isinstance(space, spaces.Tuple) and isinstance(value, tuple) and len(value) == len(space):
        return _zipped([_elements(part, one) for part, one in zip(space, value, strict=True)])
    if isinstance(space, spaces.Dict | spaces.Tuple) or space.shape is None:
        if value in space:
            return None
        elements = list(value)
        # What looks like a batch must consist of single elements.
        if any(_elements(space, element) is not None for element in elements):
            raise ValueError("it is a batch of batches")
        return elements
    array = np.asarray(value)
    if array.shape == space.shape:
        return None
    if array.shape[1:] != space.shape:
        raise ValueError(f"a part has shape {array.shape}, not {space.shape}")
    return list(array)


def _zipped(parts: Sequence[list[Any] | None]) -> list[tuple[Any, ...]] | None:
    # All parts must be batches, or none of them.
    batches = [part for part in parts if part is not None]
    if not batches:
        return None
    if len(batches) < len(parts):
        raise ValueError("some of its parts are batches and some are not")
    return list(zip(*batches, strict=True))


# ---------------------------------------------------------------------------------------------- from a run folder


def load_policy(
    run_dir: str | Path, checkpoint: str | None = None, trust: Sequence[str] = (), seed: int | None = None
) -> TrainedPolicy:
    """Load the policy of a run, or of one of its checkpoints (best, newest, or by name).

    A user's own network is code. If you did not train the run here, name the network again with `trust`. `seed` is for
    `predict(obs, deterministic=False)`.
    """
    return SavedPolicy.find(Path(run_dir), checkpoint).load(trust, seed)


@dataclass(frozen=True)
class SavedPolicy:
    """The file of a policy, and the settings of its run."""

    run_dir: Path
    config: dict[str, Any]
    policy_path: Path

    def settings(self, trust: Sequence[str]) -> AnyConfig:
        """Return the settings of the run, after a check that the user trusts the code that they name."""
        return trusted_config(self.config, self.run_dir, trust)

    @classmethod
    def find(cls, place: Path, which: str | None = None) -> SavedPolicy:
        """Find the policy of a run folder (its last; or that of the newest, best or named checkpoint), or of a
        checkpoint."""
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
            return cls._of(checkpoint.newest(place, checkpoint.load_settings).path)
        if not checkpoint.NAME.fullmatch(which):
            raise UserError(f"--checkpoint is best, newest or a name such as update-000000120, not {which!r}")
        return cls._of(checkpoint.folder_of(place) / which)

    @classmethod
    def _of(cls, path: Path) -> SavedPolicy:
        try:
            found = checkpoint.load_settings(path)
        except checkpoint.Damaged as damage:
            raise UserError(f"{path} cannot be used: {damage}") from None
        # RUN_DIR/checkpoints/update-000000120
        run_dir = path.parent.parent
        return cls(run_dir, settings_of(found, run_dir), path / POLICY)

    def load(self, trust: Sequence[str], seed: int | None = None, env_spaces: EnvSpaces | None = None) -> TrainedPolicy:
        """Load the policy. `env_spaces` serve files of older versions, which do not hold the spaces."""
        file = read_policy(self.policy_path)
        env_spaces = file.spaces or env_spaces or self._spaces_of_env(trust)
        env_spec = SpaceAdapter(policy_part(env_spaces.observation), env_spaces.action).spec
        # A file from elsewhere may hold a network of other sizes, which would fail much later and less clearly.
        actor = self._restore(file, env_spec, trust)
        taken = ActorSpec.of(env_spec, actor.spec.hidden_sizes, actor.spec.activation)
        if any(getattr(taken, name) != getattr(actor.spec, name) for name in SIZES):
            raise UserError(f"{self.policy_path} holds a network that does not fit the spaces of its environment")
        return TrainedPolicy(actor, env_spaces, self.settings, seed)

    def _restore(self, file: PolicyFile, env_spec: EnvSpec, trust: Sequence[str]) -> MLPActor | TorchActor:
        if file.description.get("kind") != "torch":
            return MLPActor.restore(file.arrays, file.description)
        from freerun.algorithms.policies.torch_actor import TorchActor  # only here: an MLP needs no torch

        config = self.settings(trust)
        network = config.algorithm.network if find_algorithm(config.algo).traits.has_network else None
        if file.description.get("network") != network:
            raise UserError(f"{self.policy_path} is of another network than its run's settings say")
        return TorchActor.restore(file.arrays, file.description, env_spec)

    def _spaces_of_env(self, trust: Sequence[str]) -> EnvSpaces:
        config = self.settings(trust)
        if is_only_tensors(config.env):
            raise UserError(
                f"{self.policy_path} was written by an older freerun and does not say what its observations are: "
                "use freerun eval, or resume the run for a moment, which writes the file again"
            )
        return make_factory(config).spaces
