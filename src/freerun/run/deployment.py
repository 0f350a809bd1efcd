"""Finds and loads the policy of a run folder or of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freerun.adapters.space_adapter import SpaceAdapter, policy_part
from freerun.adapters.tensor_envs import is_only_tensors
from freerun.algorithms.policies.numpy_actors import NumpyActor, restore_numpy
from freerun.core import EnvSpaces, EnvSpec, UserError
from freerun.persistence import checkpoint
from freerun.persistence.run_folder import POLICY, PolicyFile, RunFolder, read_policy
from freerun.run.resume import settings_of
from freerun.run.trained_policy import TrainedPolicy
from freerun.settings.config import AnyConfig
from freerun.settings.factories import make_factory
from freerun.settings.named_code import trusted_config
from freerun.settings.registry import find_algorithm

if TYPE_CHECKING:
    from freerun.algorithms.policies.torch_actor import TorchActor


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
        has_mask = bool(file.description.get("has_mask", False))
        env_spec = SpaceAdapter(policy_part(env_spaces, has_mask), env_spaces.action).spec
        # A file from elsewhere may hold a network of other sizes, which would fail much later and less clearly.
        actor = self._restore(file, env_spec, trust)
        if not actor.fits(env_spec):
            raise UserError(f"{self.policy_path} holds a network that does not fit the spaces of its environment")
        return TrainedPolicy(actor, env_spaces, self.settings, seed)

    def _restore(self, file: PolicyFile, env_spec: EnvSpec, trust: Sequence[str]) -> NumpyActor | TorchActor:
        if file.description.get("kind") != "torch":
            return restore_numpy(file.arrays, file.description)
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
