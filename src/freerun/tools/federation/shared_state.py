"""What a site shares with the others: its weights, and the moments of its normalisers. Nothing else leaves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError

from freerun.algorithms.policies.running_moments import RunningMoments
from freerun.core import Algorithm, FloatArray, UserError, WarmStartable, background_stages
from freerun.persistence.state_codec import to_numpy
from freerun.run.init_from import state_part, with_state_part
from freerun.tools.federation.moment_merging import make_moments

MOMENTS = frozenset(RunningMoments().state_dict())
"""The parts of a state that holds moments: count, mean and variance."""


@dataclass(frozen=True)
class SharedState:
    """The learned parts of an algorithm by their path: those that --init-from would take."""

    weights: dict[str, FloatArray] = field(default_factory=dict)
    moments: dict[str, RunningMoments] = field(default_factory=dict)

    @property
    def has_statistics(self) -> bool:
        """True if the moments say something about the data of a site."""
        return any(moments.count for moments in self.moments.values())

    def without(self, beginnings: tuple[str, ...]) -> SharedState:
        """Return the state without the weights whose path begins with one of these."""
        left = {path: array for path, array in self.weights.items() if not path.startswith(beginnings)}
        return SharedState(left, self.moments)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        weights = {path: self.weights[path].shape for path in sorted(self.weights)}
        return {**weights, **{path: self.moments[path].mean.shape for path in sorted(self.moments)}}

    def numbers(self) -> NDArray[np.float64]:
        """All that is shared, in one row; the shapes say what is where."""
        moments = [self.moments[path] for path in sorted(self.moments)]
        parts: list[ArrayLike] = [self.weights[path] for path in sorted(self.weights)]
        parts += [part for each in moments for part in (each.count, each.mean, each.variance)]
        return np.concatenate([np.ravel(np.asarray(part, np.float64)) for part in parts])

    def packed_moments(self) -> bytes:
        arrays = {
            f"{path}/{name}": np.array(value, dtype=np.float64)
            for path, moments in self.moments.items()
            for name, value in moments.state_dict().items()
        }
        return safetensors.numpy.save(arrays)


def unpack_moments(packed: bytes) -> dict[str, RunningMoments]:
    """Read what `SharedState.packed_moments` wrote, wherever it comes from."""
    try:
        arrays = safetensors.numpy.load(packed)
        paths = sorted({name.rpartition("/")[0] for name in arrays})
        return {path: make_moments(**{name: arrays[f"{path}/{name}"] for name in sorted(MOMENTS)}) for path in paths}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"its moments cannot be read: {error}") from None


def require_shareable(algorithm: Algorithm, algo: str) -> WarmStartable:
    """Return the algorithm, or raise UserError if it cannot be given other weights between two updates."""
    if not isinstance(algorithm, WarmStartable):
        raise UserError(f"--algo {algo} cannot be federated: it does not say which parts of its state are learned")
    if background_stages(algorithm):
        raise UserError(f"--algo {algo} cannot be federated while stages run beside the learner: give --stages in-turn")
    return algorithm


def take(algorithm: WarmStartable) -> SharedState:
    """Return a copy of what the algorithm has learned."""
    state, shared = algorithm.state_dict(), SharedState()
    for path in algorithm.learned:
        _collect(state_part(state, path), path, shared)
    return shared


def _collect(value: Any, path: str, shared: SharedState) -> None:
    if isinstance(value, Mapping):
        if value.keys() == MOMENTS:
            shared.moments[path] = make_moments(**value)
            return
        for name, part in value.items():
            _collect(part, f"{path}/{name}", shared)
    elif hasattr(value, "shape") and (array := to_numpy(value)).dtype.kind == "f":
        shared.weights[path] = array.copy()  # the algorithm goes on to change its own


def load(algorithm: WarmStartable, shared: SharedState) -> None:
    """Replace what the algorithm has learned. Optimisers, replay buffers and generators stay as they are."""
    state = algorithm.state_dict()
    for path in algorithm.learned:
        state = with_state_part(state, path, _replaced(state_part(state, path), path, shared))
    algorithm.load_state_dict(state)


def _replaced(value: Any, path: str, shared: SharedState) -> Any:
    if path in shared.moments:
        return shared.moments[path].state_dict()
    if isinstance(value, Mapping):
        return {name: _replaced(part, f"{path}/{name}", shared) for name, part in value.items()}
    if path not in shared.weights:
        return value  # counters, which are no weights
    import torch

    array = shared.weights[path]
    return torch.from_numpy(array.copy()).to(value.dtype) if isinstance(value, torch.Tensor) else array


def fitted(shared: SharedState, like: SharedState) -> SharedState:
    """Return a state with the number types of another one.

    Raise UserError, with what is wrong, unless it has the parts and shapes of the other one and is finite.
    """
    for name, theirs, ours in (("weights", shared.weights, like.weights), ("moments", shared.moments, like.moments)):
        if theirs.keys() != ours.keys():
            odd = sorted(theirs.keys() ^ ours.keys())[0]
            raise UserError(f"its {name} are those of another network: {odd} is on one side only")
    weights = {}
    for path, array in shared.weights.items():
        own = like.weights[path]
        if array.shape != own.shape:
            raise UserError(f"its weights {path} have the shape {array.shape}, not {own.shape}")
        with np.errstate(over="ignore"):  # a float64 that is too large for a float32 is refused below
            weights[path] = array.astype(own.dtype)
        if not (array.dtype.kind == "f" and np.isfinite(weights[path]).all()):
            raise UserError(f"its weights {path} are not finite")
    for path, moments in shared.moments.items():
        wanted = like.moments[path].mean.shape
        if moments.mean.shape != wanted or moments.variance.shape != wanted:
            raise UserError(f"its moments {path} have the shape {moments.mean.shape}, not {wanted}")
        numbers = SharedState({}, {path: moments}).numbers()
        if not np.isfinite(numbers).all() or moments.count < 0 or (moments.variance < 0).any():
            raise UserError(f"its moments {path} are no moments")
    return SharedState(weights, shared.moments)


def most_usual(states: Sequence[SharedState]) -> SharedState:
    """Return one of the states, which no minority can choose: of those with the most frequent shapes, the one whose
    numbers are nearest to the medians of all."""
    shapes = [str(state.shapes()) for state in states]
    usual = Counter(shapes).most_common(1)[0][0]
    fitting = [state for state, shape in zip(states, shapes, strict=True) if shape == usual]
    rows = np.stack([state.numbers() for state in fitting])
    with np.errstate(over="ignore"):  # a number near the largest one is very far away, and so is infinity
        return fitting[int(np.linalg.norm(rows - np.median(rows, axis=0), axis=1).argmin())]
