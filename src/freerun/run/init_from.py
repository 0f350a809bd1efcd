"""`--init-from`: starts a new run with what another run has learned, and with nothing else of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freerun.core import Algorithm, EnvSpaces, UserError, WarmStartable
from freerun.persistence import checkpoint
from freerun.persistence.checkpoint import Checkpoint, Damaged
from freerun.persistence.run_folder import POLICY, read_policy
from freerun.persistence.space_codec import pack_spaces
from freerun.persistence.state_codec import check_fit, to_numpy, upgrade_algorithm_state
from freerun.settings.config import AnyConfig

NETWORK_FLAGS = ("network", "memory", "memory_size", "hidden_sizes", "activation", "normalize_obs")
"""The parts of a policy's description that flags decide."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam remembers about each weight: the running means of the gradient and of its square."""


@dataclass(frozen=True)
class Learned:
    """What a checkpoint holds for a new run. It is only data: no code that the other run names is imported."""

    path: Path
    """The folder of the checkpoint."""
    algo: str
    score: float | None
    state: Mapping[str, Any]
    """The state of the algorithm."""
    policy: Mapping[str, Any]
    """The description of the policy."""
    spaces: EnvSpaces | None
    """The spaces of the environment; None if the file of the policy does not hold them."""

    def __str__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.2f}"
        return f"{self.path}{score}"


def find(place: Path) -> Learned:
    """Read the newest whole checkpoint of a run, or the checkpoint whose folder is named."""
    if checkpoint.NAME.fullmatch(place.name):
        try:
            found = checkpoint.load(place)
        except Damaged as damage:
            raise UserError(f"--init-from {place} cannot be used: {damage}") from None
    elif place.is_dir():
        found = checkpoint.newest(place)
    else:
        raise UserError(f"--init-from {place}: there is no such folder")
    return _learned(found)


def _learned(found: Checkpoint) -> Learned:
    config, state, score = (found.state.get(name) for name in ("config", "algorithm", "score"))
    if not isinstance(config, dict) or not isinstance(state, dict):
        raise UserError(f"--init-from {found.path} cannot be used: it holds no state of an algorithm")
    file = read_policy(found.path / POLICY)
    known_score = float(score) if isinstance(score, int | float) else None
    return Learned(
        found.path, str(config.get("algo")), known_score, upgrade_algorithm_state(state), file.description, file.spaces
    )


def start(algorithm: Algorithm, learned: Learned, spaces: EnvSpaces, config: AnyConfig) -> None:
    """Replace the fresh networks and normalisers by those of another run, if they fit, and say so."""
    algo = config.algo
    if not isinstance(algorithm, WarmStartable):
        raise UserError(
            f"--algo {algo} cannot start from another run: it does not say which parts of its state are learned "
            "(docs/own_algorithm.md)"
        )
    where = f"--init-from {learned.path}"
    # SAC can start from MBPO and the other way round: what counts is the names of the parts, not of the algorithm.
    if any(state_part(learned.state, path) is None for path in algorithm.learned):
        raise UserError(f"{where} was trained with --algo {learned.algo}, whose networks --algo {algo} cannot use")
    _check_spaces(learned, spaces, algorithm, where)
    _check_network(learned.policy, algorithm.policy.describe(), where)
    # Nothing of the algorithm is changed before everything has been checked.
    fresh = algorithm.state_dict()
    state = fresh
    try:
        for path in algorithm.learned:
            state = with_state_part(state, path, state_part(learned.state, path))
        check_fit(state, fresh)
        if config.init_optimizer:
            state = _with_optimizers(state, learned, algorithm)
        # One NaN in the weights would make every action NaN.
        _check_finite([state_part(state, path) for path in (*algorithm.learned, *algorithm.optimizers())])
        algorithm.load_state_dict(state)
    except UserError as error:
        raise UserError(f"{where} cannot be used: {error}") from None
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{where} cannot be used: its state does not fit this run: {error}") from None
    if not config.quiet:
        print(f"Starting from {learned}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------- whether it fits


def _check_spaces(learned: Learned, spaces: EnvSpaces, algorithm: Algorithm, where: str) -> None:
    """Observations must have the same parts and shapes, whatever their bounds. Action spaces must be equal."""
    theirs, ours = learned.policy, algorithm.policy.describe()
    if learned.spaces is not None:
        for name, their_space, our_space in zip(("observations", "actions"), learned.spaces, spaces, strict=True):
            # The bounds of observations may differ: a curriculum often widens them.
            same = their_space == our_space if name == "actions" else _structure(their_space) == _structure(our_space)
            if not same:
                raise UserError(f"{where} is for {name} in {their_space}, and this environment's are in {our_space}")
    their_mask, our_mask = (bool(one.get("has_mask")) for one in (theirs, ours))
    if their_mask != our_mask:
        has, lacks = ("that run's", "this one") if their_mask else ("this run's", "that one")
        raise UserError(f"{where} cannot be used: {has} environment has action masks, and {lacks} has none")
    for name in ("obs_size", "categories", "gaussian_size", "low", "high"):
        if name in ours and _plain(theirs.get(name)) != _plain(ours[name]):
            raise UserError(
                f"{where} is for another environment: {name} is {_plain(theirs.get(name))} there, "
                f"and {_plain(ours[name])} here"
            )


def _structure(space: Any) -> object:
    """Return kinds, shapes and names without bounds; the space itself if it cannot be described."""
    described = pack_spaces(EnvSpaces(space, space))
    return space if described is None else _without_bounds(described[0])


def _without_bounds(part: object) -> object:
    if isinstance(part, dict):
        return {name: _without_bounds(value) for name, value in part.items() if name not in ("low", "high")}
    return [_without_bounds(value) for value in part] if isinstance(part, list) else part


def _check_network(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> None:
    for name in NETWORK_FLAGS:
        their_value, our_value = _plain(theirs.get(name)), _plain(ours.get(name))
        if their_value != our_value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{where} has another network: give {_flag(flag, their_value)} as that run did")


def _flag(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    if value is None:
        return f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _plain(value: object) -> object:
    """Return a value as JSON would: JSON has no tuples."""
    return list(value) if isinstance(value, tuple) else value


def _check_finite(state: object) -> None:
    for value in _leaves(state):
        array = to_numpy(value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError("its numbers are not finite")


def _leaves(state: object) -> list[object]:
    if isinstance(state, Mapping | list):
        parts = state.values() if isinstance(state, Mapping) else state
        return [leaf for part in parts for leaf in _leaves(part)]
    return [state] if hasattr(state, "shape") else []


# ---------------------------------------------------------------------------------------------- parts of a state


def state_part(state: Any, path: str) -> Any:
    """Return what lies at a path such as agent/actor; None if there is nothing."""
    for name in path.split("/"):
        state = state.get(name) if isinstance(state, Mapping) else None
    return state


def with_state_part(state: Mapping[str, Any], path: str, part: Any) -> dict[str, Any]:
    name, _, rest = path.partition("/")
    # A copy of each mapping on the path: the algorithm's own state must not change before all is checked.
    return {**state, name: with_state_part(state[name], rest, part) if rest else part}


def _with_optimizers(state: dict[str, Any], learned: Learned, algorithm: WarmStartable) -> dict[str, Any]:
    """Add the moments of the optimisers. Their settings, such as the learning rate, are those of the new run."""
    for path, optimizer in algorithm.optimizers().items():
        moments = state_part(learned.state, f"{path}/state")
        if not isinstance(moments, Mapping):
            raise UserError(f"it has no optimiser at {path}")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, kept in moments.items():
            # Adam's fused step trusts these shapes: with another one it would read beyond the end of an array.
            if any(kept[name].shape != parameters[number].shape for name in MOMENTS) or kept["step"].shape != ():
                raise UserError(f"its optimiser at {path} is of other networks")
        state = with_state_part(state, f"{path}/state", moments)
    return state
