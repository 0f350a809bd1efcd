"""Which way to compute small networks on a CPU is the fastest? What was tried for PPO's gradient steps.

The networks are those of HalfCheetah: 17 observations, 6 actions, two MLPs with 64-64 units and tanh. Three ways take
whole gradient steps: torch's autograd, numpy, and the compiled kernel. The others were tried for the networks alone,
forward and backward, beside the numpy of the fast learner. One thread; all take turns within a repetition. It needs
`pip install numba` and a C compiler.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from gymnasium import spaces
from run_file import ResultFile, write_report
from threadpoolctl import threadpool_limits

from freerun.algorithms.learners.compiled_kernel import compiled_kernel
from freerun.algorithms.policies.networks import ActorCritic, flatten_parameters
from freerun.algorithms.policies.numpy_mlp import NumpyMLP, layers_of
from freerun.algorithms.ppo.compiled_steps import CompiledSteps
from freerun.algorithms.ppo.gradient_steps import AutogradSteps, FastSteps, GradientSteps, ProximalTerm
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig, with_sizes
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import EnvSpec, FloatArray, SingleLearner

OBS_SIZE, ACTION_SIZE, NUM_ROWS = 17, 6, 4000
SPEC = EnvSpec(spaces.Box(-np.inf, np.inf, (OBS_SIZE,), np.float32), spaces.Box(-1, 1, (ACTION_SIZE,), np.float32))
NUM_STEPS = 40
"""Gradient steps in a repetition."""
Step = Callable[[int], None]
"""Takes the gradient step with this number."""
STEPS = {
    "steps: torch's autograd": "whole gradient steps, the reference",
    "steps: numpy": "`--learner numpy`",
    "steps: C": "the compiled kernel, `--learner fast`",
    "networks: numpy": "as in `--learner numpy`",
    "networks: numpy, joined": "both first layers in one product, and biases through a column of ones",
    "networks: torch kernels": "addmm, tanh_ and mm into the same memory, without autograd",
    "networks: numba": "products by numpy; bias, tanh and its slope in loops that numba compiles",
}


@dataclass(frozen=True)
class Options:
    minibatch_sizes: tuple[int, ...] = (64, 250, 2000)
    repeats: int = 7
    output: Path = Path(__file__).parent / "results" / "gradient_ways"


def fresh_net() -> tuple[ActorCritic, torch.nn.Parameter]:
    net = ActorCritic(PPO(SPEC, PPOConfig(), 0, "cpu", False).net.spec)
    return net, flatten_parameters(net)


def whole_step(name: str, rows: list[torch.Tensor]) -> Step:
    config = with_sizes(PPOConfig())
    net, weights = fresh_net()
    optimizer = torch.optim.Adam([weights], 3e-4, eps=1e-5, fused=True)
    parts = (net, weights, optimizer, SingleLearner(), torch.zeros(1), ProximalTerm(weights))
    steps: GradientSteps
    kernel = compiled_kernel()
    if name == "torch's autograd":
        steps = AutogradSteps(*parts)
    elif name == "numpy":
        steps = FastSteps(*parts)
    else:
        assert kernel is not None  # `main` looks
        steps = CompiledSteps(*parts, kernel)
    torch.manual_seed(0)
    number = torch.randn(NUM_ROWS)
    columns = (number - 9, torch.ones(NUM_ROWS), number, number, number)
    steps.begin(config, TrainingBatch(torch.randn(NUM_ROWS, OBS_SIZE), torch.randn(NUM_ROWS, ACTION_SIZE), *columns))

    def step(turn: int) -> None:
        steps.compute(rows[turn % len(rows)], None)
        steps.descend(1.0)

    return step


def numpy_step(x: FloatArray) -> Step:
    net, _ = fresh_net()
    networks = [NumpyMLP(layers_of(part), "tanh") for part in (net.actor, net.critic)]
    gradients = [np.ones((len(x), size), np.float32) for size in (ACTION_SIZE, 1)]

    def step(turn: int) -> None:
        for network, gradient in zip(networks, gradients, strict=True):
            network.forward(x)
            network.backward(gradient)

    return step


def weights_of(net: ActorCritic) -> list[list[FloatArray]]:
    """[outputs, inputs] of each layer, of actor and critic."""
    return [[layer.weight.T.copy() for layer in layers_of(part)] for part in (net.actor, net.critic)]


def joined_step(x: FloatArray) -> Step:
    """The first layers as one [inputs + 1, 128], the other layers as [65, 64] and [65, outputs]."""
    n = len(x)
    net, _ = fresh_net()
    both = [[np.concatenate([w.T, np.zeros((1, len(w)), np.float32)]) for w in part] for part in weights_of(net)]
    first = np.concatenate([part[0] for part in both], axis=1)
    x1 = np.concatenate([x, np.ones((n, 1), np.float32)], axis=1)
    hidden = np.empty((n, 128), np.float32)
    inputs = [[np.ones((n, 65), np.float32) for _ in range(2)] for _ in both]
    outputs = [[np.empty((n, part[layer].shape[1]), np.float32) for layer in (1, 2)] for part in both]
    gradient, slope, d_hidden = np.empty((n, 65), np.float32), np.empty((n, 64), np.float32), np.empty_like(hidden)

    def step(turn: int) -> None:
        np.tanh(np.dot(x1, first, out=hidden), out=hidden)
        for number, (part, own, out) in enumerate(zip(both, inputs, outputs, strict=True)):
            columns = slice(64 * number, 64 * number + 64)
            own[0][:, :64] = hidden[:, columns]
            np.tanh(np.dot(own[0], part[1], out=out[0]), out=own[1][:, :64])
            np.dot(own[1], part[2], out=out[1])
            out[1].fill(1.0)
            np.dot(own[1].T, out[1])
            passed = out[1]
            for layer in (2, 1):
                activated = own[layer - 1][:, :64]
                np.dot(passed, part[layer].T, out=gradient)
                np.multiply(activated, activated, out=slope)
                np.subtract(1.0, slope, out=slope)
                np.multiply(slope, gradient[:, :64], out=slope)
                if layer == 2:
                    np.dot(own[0].T, slope)
                    passed = slope
            d_hidden[:, columns] = slope
        np.dot(x1.T, d_hidden)

    return step


def torch_step(x: FloatArray) -> Step:
    net, _ = fresh_net()
    rows, n = torch.from_numpy(x), len(x)
    linears = [
        [layer for layer in part.children() if isinstance(layer, torch.nn.Linear)] for part in (net.actor, net.critic)
    ]
    parts = [[(layer.weight.detach(), layer.bias.detach()) for layer in part] for part in linears]
    memory = [[torch.empty(n, len(bias)) for _, bias in part] for part in parts]
    gradients = [[torch.ones(n, len(bias)) for _, bias in part] for part in parts]
    products = [[torch.empty_like(weight) for weight, _ in part] for part in parts]

    def step(turn: int) -> None:
        for part, outputs, passed, product in zip(parts, memory, gradients, products, strict=True):
            now = rows
            for number, (weight, bias) in enumerate(part):
                now = torch.addmm(bias, now, weight.T, out=outputs[number])
                if number < 2:
                    now.tanh_()
            for number in (2, 1, 0):
                torch.mm(passed[number].T, outputs[number - 1] if number else rows, out=product[number])
                passed[number].sum(0)
                if number:
                    torch.mm(passed[number], part[number][0], out=passed[number - 1])
                    below, activated = passed[number - 1], outputs[number - 1]
                    torch.ops.aten.tanh_backward.grad_input(below, activated, grad_input=below)

    return torch.no_grad()(step)


def numba_step(x: FloatArray) -> Step:
    import numba  # type: ignore[import-not-found,unused-ignore]

    @numba.njit(fastmath=True)  # type: ignore[untyped-decorator,unused-ignore]
    def add_bias_and_activate(rows: Any, bias: Any) -> None:
        for i in range(rows.shape[0]):
            for j in range(rows.shape[1]):
                rows[i, j] = np.tanh(rows[i, j] + bias[j])

    @numba.njit(fastmath=True)  # type: ignore[untyped-decorator,unused-ignore]
    def pass_activation(gradient: Any, activated: Any, bias_gradient: Any) -> None:
        bias_gradient[:] = 0.0
        for i in range(gradient.shape[0]):
            for j in range(gradient.shape[1]):
                gradient[i, j] *= np.float32(1.0) - activated[i, j] * activated[i, j]
                bias_gradient[j] += gradient[i, j]

    net, _ = fresh_net()
    n, parts = len(x), weights_of(net)
    biases = np.zeros((2, 64), np.float32)
    memory = [[np.empty((n, len(w)), np.float32) for w in part] for part in parts]
    gradients = [[np.ones((n, len(w)), np.float32) for w in part] for part in parts]

    def step(turn: int) -> None:
        for part, outputs, passed in zip(parts, memory, gradients, strict=True):
            now = x
            for number, weight in enumerate(part):
                now = np.dot(now, weight.T, out=outputs[number])
                if number < 2:
                    add_bias_and_activate(now, biases[0])
            for number in (2, 1, 0):
                np.dot(passed[number].T, outputs[number - 1] if number else x)
                if number:
                    np.dot(passed[number], part[number], out=passed[number - 1])
                    pass_activation(passed[number - 1], outputs[number - 1], biases[1])

    return step


def contenders(size: int) -> dict[str, Step]:
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))
    rows = [part for part in order.split(size) if len(part) == size]  # type: ignore[no-untyped-call]
    x = np.random.default_rng(0).standard_normal((size, OBS_SIZE), np.float32)
    made: dict[str, Step] = {f"steps: {name}": whole_step(name, rows) for name in ("torch's autograd", "numpy", "C")}
    made["networks: numpy"], made["networks: numpy, joined"] = numpy_step(x), joined_step(x)
    made["networks: torch kernels"], made["networks: numba"] = torch_step(x), numba_step(x)
    return made


def measure(size: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds per row, of every way and repetition."""
    made = contenders(size)
    times: dict[str, list[float]] = {name: [] for name in made}
    for repetition in range(repeats + 1):
        for name, step in made.items():
            began = time.perf_counter()
            for turn in range(NUM_STEPS):
                step(turn)
            if repetition:  # the first one allocates memory, and compiles
                times[name].append(1e6 * (time.perf_counter() - began) / NUM_STEPS / size)
    return times


def markdown(results: dict[str, Any]) -> str:
    sizes = list(results)
    lines = [
        "Microseconds per row of a gradient step with one thread, by minibatch: median (lowest – highest). "
        "`benchmarks/gradient_ways.py` wrote this.",
        "",
        f"| | {' | '.join(sizes)} | repetitions | |",
        f"| --- |{' ---: |' * len(sizes)} ---: | --- |",
    ]
    for name, note in STEPS.items():
        found = [results[size].get(name) for size in sizes]
        shown = [f"{statistics.median(one):.2f} ({min(one):.2f} – {max(one):.2f})" if one else "–" for one in found]
        repeats = min((len(one) for one in found if one), default=0)
        lines.append(f"| {name} | {' | '.join(shown)} | {repeats} | {note} |")
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = ResultFile(folder / "gradient_ways.json", {})
    return write_report(folder / "gradient_ways.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    # Without one of the ways, its earlier figures would be lost: all ways of a minibatch size are one row.
    if importlib.util.find_spec("numba") is None or compiled_kernel() is None:
        raise SystemExit("All ways are measured together: this needs numba (pip install numba) and a C compiler.")
    torch.set_num_threads(1)
    threadpool_limits(1, "blas")
    file = ResultFile(options.output / "gradient_ways.json", {})
    for size in options.minibatch_sizes:
        file.content[str(size)] = measure(size, options.repeats)
        file.save(str(size))
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
