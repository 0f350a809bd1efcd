"""Exports a trained policy to a file for other programs, with a contract that says what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import EnvFailure, UserError, callable_name
from freerun.persistence.files import write_json
from freerun.persistence.space_codec import describe_limits
from freerun.run import parity
from freerun.run.deployment import SavedPolicy
from freerun.run.export_formats import FORMATS, inputs_of, run_trained
from freerun.run.exported_module import ACTION, LOGITS, NEXT_MEMORY
from freerun.run.parity import Parity
from freerun.run.trained_policy import TrainedPolicy
from freerun.settings.factories import make_factory
from freerun.version import VERSION

CONTRACT_VERSION = 1
"""Goes up when a reader of older contracts would misread a newer one."""
CONTRACT_SUFFIX = ".json"
NUM_OBSERVATIONS = 1000


@dataclass(frozen=True)
class Export:
    """The files of an exported policy, and how it compares with the trained one."""

    path: Path
    contract_path: Path
    parity: Parity

    def __str__(self) -> str:
        return f"policy: {self.path}\ncontract: {self.contract_path}\n{self.parity}"


def export(
    run_dir: str | Path,
    to: str = "onnx",
    output: str | Path | None = None,
    frequency: float | None = None,
    checkpoint: str | None = None,
    observations: int = NUM_OBSERVATIONS,
    trust: Sequence[str] = (),
) -> Export:
    """Write the policy of a run, or of one of its checkpoints, to a file: `to` is onnx, torchscript or numpy.

    `frequency` is the rate in Hz at which actions are to be taken. `observations` is how many the file is checked with.
    """
    if to not in FORMATS:
        raise UserError(f"there is no format {to!r}: use --to {', '.join(FORMATS)}")
    if observations < 1:
        raise UserError(f"--observations must be at least 1, not {observations}")
    if frequency is not None and not frequency > 0:
        raise UserError(f"--frequency must be more than 0 Hz, not {frequency:g}")
    kind = FORMATS[to]
    if kind.package is not None:
        kind.package.require(f"--to {to}")
    saved = SavedPolicy.find(Path(run_dir), checkpoint)
    policy = saved.load(trust)
    path = Path(output) if output is not None else saved.run_dir / "export" / f"policy{kind.suffix}"
    if path.suffix != kind.suffix:
        raise UserError(f"--output {path} must end with {kind.suffix}, so that everybody sees what it is")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind.write(policy, path)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}; name another --output") from None
    factory, reason = _find_factory(saved, trust)
    env = None if factory is None else factory.make_one().env
    about = {"format": to, "file": path.name, **_origin(saved, checkpoint), **_rate(env, frequency)}
    seed = int(saved.config.get("seed", 0))
    if factory is not None and env is not None:
        found = parity.record(env, policy, seed, observations, factory.mask_source)
        source = "recorded by playing the environment"
    else:
        found, source = (
            parity.draw(policy, seed, observations),
            f"drawn at random, as there is no environment: {reason}",
        )
    compared = parity.compare(run_trained(policy), kind.open(path, policy), found, source, policy.action_space)
    contract = {"contract_version": CONTRACT_VERSION, **about, **_signature(policy), "parity": asdict(compared)}
    contract_path = path.with_name(path.name + CONTRACT_SUFFIX)
    write_json(contract_path, contract)
    return Export(path, contract_path, compared)


def _find_factory(saved: SavedPolicy, trust: Sequence[str]) -> tuple[GymnasiumFactory | None, str]:
    """Return the factory of the run's environments; if there can be none here, say why."""
    try:
        return make_factory(saved.settings(trust)), ""
    except (UserError, EnvFailure) as error:  # not installed here, not trusted, or tensors that are never alone
        return None, str(error).splitlines()[0]


# ---------------------------------------------------------------------------------------------- the contract


def _origin(saved: SavedPolicy, checkpoint: str | None) -> dict[str, Any]:
    return {
        "freerun": VERSION,
        "run": saved.run_dir.resolve().name,
        "checkpoint": checkpoint,
        "algorithm": callable_name(saved.config["algo"]),
        "environment": callable_name(saved.config["env"]),
    }


def _rate(env: gymnasium.Env[Any, Any] | None, frequency: float | None) -> dict[str, Any]:
    """Return the rate of actions and the units of all numbers, as far as the environment's metadata have them."""
    metadata: dict[str, Any] = (env.metadata if env is not None else None) or {}
    source = "--frequency"
    if frequency is None:
        frequency = metadata.get("render_fps")
        source = "render_fps in the environment's metadata"
    return {"frequency_hz": frequency, "frequency_from": source if frequency else None, "units": metadata.get("units")}


def _signature(policy: TrainedPolicy) -> dict[str, Any]:
    inputs = [_array(part.name, part.shape, part.dtype, part.space) for part in inputs_of(policy)]
    space = policy.action_space
    outputs = [_array(ACTION, space.shape or (), space.dtype, space)]
    if policy.has_logits:
        outputs.append(_array(LOGITS, (policy.actor.head_size,), np.dtype(np.float32), None))
    if policy.memory_size:
        outputs.append(_array(NEXT_MEMORY, (policy.memory_size,), np.dtype(np.float32), None))
    return {"inputs": inputs, "outputs": outputs}


def _array(name: str, shape: tuple[int, ...], dtype: Any, space: spaces.Space[Any] | None) -> dict[str, Any]:
    about = {"name": name, "shape": ["batch", *shape], "dtype": np.dtype(dtype).name}
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, spaces.Discrete):
        low, high = np.asarray(space.start), np.asarray(space.start + space.n - 1)
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    else:
        return about
    return {**about, "low": describe_limits(low), "high": describe_limits(high)}
