"""The files that a policy can be exported to: how each is written, and how it is run again for the parity check."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from freerun.core import Array, EnvSpaces, RequiredPackage, UserError
from freerun.run import numpy_export
from freerun.run.exported_module import ACTION, LOGITS, NEXT_MEMORY, ExportedModule, ObservationPart, input_parts
from freerun.run.trained_policy import TrainedPolicy


class PolicyOutputs(NamedTuple):
    """What a policy returns for a batch of observations."""

    action: Array
    logits: Array | None = None
    """Of discrete actions."""
    next_memory: Array | None = None
    """What a policy with a memory remembers after this step."""


RunPolicy = Callable[[Sequence[Any]], PolicyOutputs]
"""From observations as the environment gives them, each an `ExtendedObservation` where the policy was trained with
masks or has a memory, to the outputs of an exported policy."""


@dataclass(frozen=True)
class ExportFormat:
    """A kind of file."""

    description: str
    suffix: str
    write: Callable[[TrainedPolicy, Path], None]
    open: Callable[[Path, TrainedPolicy], RunPolicy]
    """Opens the file as a robot would. The policy tells which arrays it takes."""
    package: RequiredPackage | None = None


def run_trained(policy: TrainedPolicy) -> RunPolicy:
    """Return the outputs of a policy as freerun itself computes them."""

    def run(observations: Sequence[Any]) -> PolicyOutputs:
        obs, masks, memory, logits = list(observations), None, None, None
        if policy.has_mask:
            masks = [one.action_mask for one in observations]
        if policy.memory_size:
            memory = np.stack([one.memory for one in observations])
        if policy.has_mask or policy.memory_size:
            obs = [one.observation for one in observations]
        if policy.has_logits:
            logits = policy.logits(obs, masks, None if memory is None else memory.copy())
        return PolicyOutputs(policy.predict(obs, action_mask=masks, memory=memory), logits, memory)

    return run


def inputs_of(policy: TrainedPolicy) -> list[ObservationPart]:
    """Return the arrays that a policy takes."""
    return input_parts(policy.observation_space, policy.action_space, policy.has_mask, policy.memory_size)


def output_names(policy: TrainedPolicy) -> list[str]:
    """Return the names of what a policy returns, in order; they are those of `PolicyOutputs`."""
    return [ACTION, *([LOGITS] if policy.has_logits else []), *([NEXT_MEMORY] if policy.memory_size else [])]


def _module(policy: TrainedPolicy) -> ExportedModule:
    actor: Any = policy.actor  # a policy that was loaded from a file is a NumpyActor or a TorchActor
    return ExportedModule(actor, EnvSpaces(policy.observation_space, policy.action_space))


@contextmanager
def _exporting(to: str) -> Iterator[None]:
    """Say in one sentence that torch cannot export a network, which may be any code of the user's."""
    try:
        with _quiet():
            yield
    except (torch.onnx.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        reason = next((line for line in str(error.__cause__ or error).splitlines() if line.strip()), "")
        raise UserError(f"torch cannot export this network to {to}: {type(error).__name__}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch says about its own exporters. What they write is checked afterwards."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _write_onnx(policy: TrainedPolicy, path: Path) -> None:
    module = _module(policy)
    example, names = module.example(), [part.name for part in inputs_of(policy)]
    batch = torch.export.Dim("batch")
    with _exporting("ONNX"):
        torch.onnx.export(
            module,
            example,
            path,
            input_names=names,
            output_names=output_names(policy),
            # `forward` takes any number of observations, so there is one nested entry for all of them.
            dynamic_shapes=(tuple({0: batch} for _ in example),),
            external_data=False,
            dynamo=True,
            verbose=False,
        )


def _open_onnx(path: Path, policy: TrainedPolicy) -> RunPolicy:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    parts, names = inputs_of(policy), output_names(policy)

    def run(observations: Sequence[Any]) -> PolicyOutputs:
        outputs = session.run(names, {part.name: part.stack(observations) for part in parts})
        return PolicyOutputs(**dict(zip(names, outputs, strict=True)))

    return run


def _write_torchscript(policy: TrainedPolicy, path: Path) -> None:
    module = _module(policy)
    with _exporting("TorchScript"):
        torch.jit.save(torch.jit.trace(module, module.example()), str(path))  # type: ignore[no-untyped-call]


def _open_torchscript(path: Path, policy: TrainedPolicy) -> RunPolicy:
    with _quiet():
        module = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    parts, names = inputs_of(policy), output_names(policy)

    def run(observations: Sequence[Any]) -> PolicyOutputs:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(part.stack(observations)) for part in parts))
        return PolicyOutputs(**{name: output.numpy() for name, output in zip(names, outputs, strict=True)})

    return run


FORMATS = {
    "onnx": ExportFormat(
        "for onnxruntime and other programs, in any language",
        ".onnx",
        _write_onnx,
        _open_onnx,
        RequiredPackage("onnxruntime", "ONNX", "export", also=("onnx", "onnxscript")),
    ),
    "torchscript": ExportFormat("for torch.jit.load, in Python or C++", ".pt", _write_torchscript, _open_torchscript),
    "numpy": ExportFormat(
        "for freerun.load_policy, without torch",
        numpy_export.SUFFIX,
        numpy_export.save,
        lambda path, _: run_trained(numpy_export.load(path)),
    ),
}
