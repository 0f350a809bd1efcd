"""PPO on the drone (hover), by freerun and by RSL-RL's own runner: steps per second in training, and return by steps.

The same simulator, network, batch, epochs, minibatches and step size for all; each run has a process of its own, and
runs are interleaved. RSL-RL writes no log here, which is when it is fastest; freerun writes its own as always. RSL-RL's
runner launches the simulator's kernels one by one. freerun records them as a CUDA graph, and is measured without that,
too: many simulators cannot be recorded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from run_file import ResultFile, merge, write_report

System = Literal["rsl_rl", "batch", "sync", "batch_eager"]
NAMES: dict[System, str] = {
    "rsl_rl": "RSL-RL",
    "batch": "freerun, batch (v2)",
    "sync": "freerun, sync",
    "batch_eager": "freerun, eager simulator, batch (v2)",
}
EAGER = "_eager"
WARM_UP_SHARE = 0.1
"""Of the updates: graphs are captured and libraries loaded in the first."""
TENTHS = (1, 2, 3, 5, 7, 10)
"""Of the steps, at which returns are compared."""


@dataclass(frozen=True)
class Work:
    """What every system has to do."""

    num_envs: int = 4096
    num_steps_per_env: int = 24
    num_updates: int = 150
    num_epochs: int = 5
    num_minibatches: int = 4
    hidden_sizes: tuple[int, ...] = (256, 256, 256)
    learning_rate: float = 1e-3
    init_std: float = 0.5
    task: str = "hover"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    num_threads: int = 1
    """Of torch, on the CPU."""

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.num_steps_per_env


@dataclass(frozen=True)
class Options:
    work: tyro.conf.OmitArgPrefixes[Work] = field(default_factory=Work)
    systems: tuple[System, ...] = tuple(NAMES)
    repeats: int = 3
    """Runs of each, with seeds from 0 on; the medians count."""
    output: Path | None = None
    """Folder for beside_rsl_rl.json and beside_rsl_rl.md."""
    one: Annotated[System | None, tyro.conf.arg(help="For the benchmark's own processes: run this one.")] = None
    seed: int = 0
    """Of that one."""


@dataclass(frozen=True)
class Curve:
    """One run: after each update, the seconds since the first began, and the mean return of episodes that ended."""

    steps: list[int]
    seconds: list[float]
    returns: list[float | None]

    def steps_per_second(self) -> float:
        first = max(1, round(WARM_UP_SHARE * len(self.steps))) - 1
        return (self.steps[-1] - self.steps[first]) / (self.seconds[-1] - self.seconds[first])

    def return_at(self, tenths: int) -> float:
        """The last that is known by then."""
        known = [value for value in self.returns[: len(self.returns) * tenths // 10] if value is not None]
        return known[-1] if known else float("nan")


# ---------------------------------------------------------------------------------------------- RSL-RL


def run_rsl_rl(work: Work, seed: int) -> Curve:
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # its logger imports git, which need not be installed
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict
    from torch import Tensor

    from freerun.adapters.rsl_rl_vec_env import RslRlVecEnv
    from freerun_envs.drone_sim import RoughDroneSim

    class Watched(RslRlVecEnv):
        """Adds up returns on the device: RSL-RL does so itself only where it writes a log, and asks at every step."""

        def __init__(self, sim: RoughDroneSim):
            super().__init__(sim)
            self._return = torch.zeros(self.num_envs, device=self.device)
            self._sums = torch.zeros(2, device=self.device)

        def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
            obs, reward, dones, extras = super().step(actions)
            self._return += reward
            self._sums += torch.stack([(self._return * dones).sum(), dones.sum()])
            self._return *= 1 - dones
            return obs, reward, dones, extras

        def mean_return(self) -> float | None:
            total, count = self._sums.tolist()
            self._sums.zero_()
            return total / count if count else None

    torch.manual_seed(seed)
    env = Watched(RoughDroneSim(work.num_envs, work.device, work.task, seed))
    model = {"class_name": "MLPModel", "hidden_dims": list(work.hidden_sizes), "activation": "tanh"}
    runner = OnPolicyRunner(
        env,
        {
            "num_steps_per_env": work.num_steps_per_env,
            "save_interval": work.num_updates + 1,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": work.init_std}},
            "critic": dict(model),
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": work.num_epochs,
                "num_mini_batches": work.num_minibatches,
                "learning_rate": work.learning_rate,
                "schedule": "fixed",
                "entropy_coef": 0.0,
                "value_loss_coef": 1.0,
                "use_clipped_value_loss": False,
                "normalize_advantage_per_mini_batch": True,
            },
        },
        device=work.device,
    )
    curve = Curve([], [], [])

    def note(**_: Any) -> None:
        curve.returns.append(env.mean_return())
        curve.steps.append((len(curve.steps) + 1) * work.steps_per_update)
        curve.seconds.append(time.perf_counter() - started)

    runner.logger.log = note
    started = time.perf_counter()
    runner.learn(work.num_updates, init_at_random_ep_len=True)
    return curve


# ---------------------------------------------------------------------------------------------- freerun


def run_freerun(system: System, work: Work, seed: int) -> Curve:
    import math

    import freerun
    from freerun_envs.drone_sim import RoughDroneSim

    env: dict[str, Any] = {
        "env": "freerun/RoughDrone-v0",
        "env_args": {"task": work.task},
        "num_envs": work.num_envs,
    }
    if system.endswith(EAGER):
        sim = RoughDroneSim(work.num_envs, work.device, work.task, seed, stagger=True)
        sim.is_capturable = False
        env = {"env": sim}
    with tempfile.TemporaryDirectory() as folder:
        result = freerun.train(
            **env,
            mode=system.removesuffix(EAGER),
            num_steps_per_env=work.num_steps_per_env,
            total_steps=work.num_updates * work.steps_per_update,
            num_epochs=work.num_epochs,
            minibatch_size=work.steps_per_update // work.num_minibatches,
            hidden_sizes=work.hidden_sizes,
            activation="tanh",
            learning_rate=work.learning_rate,
            initial_log_std=math.log(work.init_std),
            value_coef=1.0,
            max_grad_norm=1.0,
            device=work.device,
            learner_threads=work.num_threads,
            seed=seed,
            quiet=True,
            run_dir=Path(folder) / "run",
        )
        records = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return Curve(*([record[name] for record in records] for name in ("step", "wall_seconds", "return_mean")))


# ---------------------------------------------------------------------------------------------- comparing


def run_one(system: System, work: Work, seed: int) -> None:
    torch.set_num_threads(work.num_threads)
    if work.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # as freerun does
    curve = run_rsl_rl(work, seed) if system == "rsl_rl" else run_freerun(system, work, seed)
    print("\n" + json.dumps(asdict(curve)))


def in_a_process(system: System, seed: int) -> Curve:
    """This script again, with the same flags."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", system, "--seed", str(seed)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{system} failed:\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}")
    return Curve(**json.loads(finished.stdout.splitlines()[-1]))


def report(work: Work, curves: dict[System, list[Curve]]) -> str:
    sizes = "×".join(map(str, work.hidden_sizes))
    lines = [
        "# PPO on RoughDrone, beside RSL-RL's runner",
        "",
        f"Task {work.task}, {work.num_envs:,} drones × {work.num_steps_per_env} steps, {work.num_epochs} epochs of "
        f"{work.num_minibatches} minibatches, {sizes} tanh, {work.num_updates} updates on {work.device}; "
        f"{max(map(len, curves.values()))} interleaved runs each: medians (lowest – highest). "
        "`benchmarks/beside_rsl_rl.py` wrote this.",
        "",
        "| | steps/s in training | beside RSL-RL | "
        + " | ".join(f"return at {tenths * work.num_updates * work.steps_per_update // 10:,}" for tenths in TENTHS)
        + " |",
        "| --- " * (3 + len(TENTHS)) + "|",
    ]
    rates = {system: [curve.steps_per_second() for curve in found] for system, found in curves.items()}
    theirs = statistics.median(rates["rsl_rl"]) if "rsl_rl" in rates else float("nan")
    for system, found in curves.items():
        rate = statistics.median(rates[system])
        spread = f"{rate:,.0f} ({min(rates[system]):,.0f} – {max(rates[system]):,.0f})"
        returns = [statistics.median(curve.return_at(tenths) for curve in found) for tenths in TENTHS]
        figures = " | ".join(f"{value:.1f}" for value in returns)
        lines.append(f"| {NAMES[system]} | {spread} | {rate / theirs:.2f} × | {figures} |")
    return "\n".join(lines) + "\n"


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / "beside_rsl_rl.json", {}, lambda content: content["runs"])


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    curves = {system: [Curve(**run) for run in runs] for system, runs in file.content["runs"].items()}
    return write_report(folder / "beside_rsl_rl.md", report(Work(**file.content["work"]), curves), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.one is not None:
        run_one(options.one, options.work, options.seed)
        return
    curves: dict[System, list[Curve]] = {system: [] for system in options.systems}
    for seed in range(options.repeats):
        for system in options.systems:
            curves[system].append(in_a_process(system, seed))
            print(seed, NAMES[system], f"{curves[system][-1].steps_per_second():,.0f} steps/s", flush=True)
    print(report(options.work, curves))
    if options.output is not None:
        file = open_results(options.output)
        runs = {system: [asdict(curve) for curve in found] for system, found in curves.items()}
        now = json.loads(json.dumps({"work": asdict(options.work), "runs": runs}))  # tuples are lists in a file
        file.content = merge(file.content, now, "runs", "work")
        file.save(*runs)
        write_reports(options.output)


if __name__ == "__main__":
    main()
