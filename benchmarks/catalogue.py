"""Which result files each benchmark writes, which sources they depend on, and a fingerprint of those sources."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
WRITES_PAGES = ("markdown", "report", "write_report", "table", "draw", "summary")
"""How those functions of a benchmark begin that only write pages. They are left out of fingerprints."""


MENDED_LINES = {
    # A race at the start of a pool of processes, before anything is measured.
    "        for key, finalizer in util._finalizer_registry.copy().items():  # type: ignore[attr-defined]": (
        "        for key, finalizer in list(util._finalizer_registry.items()):  # type: ignore[attr-defined]"
    ),
}
"""Lines that were mended without a change of any figure, each with the line before: both have the same fingerprint. An
entry may go when all results that depend on its line have been measured again."""


def all_but(folder: str, *names: str) -> tuple[str, ...]:
    """Return the modules of a folder without those that a benchmark never runs."""
    files = sorted((REPOSITORY / folder).glob("*.py"))
    assert set(names) <= {file.name for file in files}, folder
    return tuple(file.relative_to(REPOSITORY).as_posix() for file in files if file.name not in names)


COLLECTING = (
    "src/freerun/core",
    *(f"src/freerun/collecting/{part}" for part in ("modes", "rollouts", "scheduling", "workers")),
    "src/freerun/transport",
)
ON_RAY = ("src/freerun/collecting/ray",)
DEVICE_ACTORS = ("device_actor.py", "memory_device_actor.py")
ON_TENSORS = ("src/freerun/collecting/tensors", *(f"src/freerun/algorithms/policies/{name}" for name in DEVICE_ACTORS))
LEARNERS = ("src/freerun/algorithms/learners", *all_but("src/freerun/algorithms/policies", *DEVICE_ACTORS))
PPO = (*LEARNERS, *all_but("src/freerun/algorithms/ppo", "graphed_epochs.py"))
SAC = (*LEARNERS, *all_but("src/freerun/algorithms/sac", "gpu_steps.py"))
MBPO = (*SAC, "src/freerun/algorithms/mbpo")
ON_GPUS = (
    *("src/freerun/cuda_graphs.py", "src/freerun/algorithms/ppo/graphed_epochs.py"),
    "src/freerun/algorithms/sac/gpu_steps.py",
)
TRAINING = (*COLLECTING, *PPO, "src/freerun/settings/defaults.py")
DRONE = ("src/freerun_envs/drone_sim.py", "src/freerun_envs/drone_physics.py")
TENSORS = (*TRAINING, *ON_TENSORS, *DRONE)
OFF_POLICY_TENSORS = (*COLLECTING, "src/freerun/settings/defaults.py", *ON_TENSORS, *DRONE, *ON_GPUS)
DEFENCE = (
    "src/freerun_envs/network_defence.py",
    "src/freerun_envs/network_red.py",
    "src/freerun_envs/single_network.py",
)
SIMULATORS = ("src/freerun_envs/sumo_intersection.py", "src/freerun_envs/power_grid.py")
RUNNERS = ("benchmarks/peer_runners",)
C = (".c", ".h")
OUTPUT = "--output benchmarks/results/{folder}"


@dataclass(frozen=True)
class Benchmark:
    """A script under benchmarks/, and what its results depend on besides the script itself."""

    sources: tuple[str, ...]
    """Files and folders of the repository. The list is coarse: what can change a figure by more than its noise."""
    files: tuple[str, ...] = ()
    """Its result files under benchmarks/results; if not given, NAME/NAME.json."""
    flags: str = ""
    """Flags that the script needs to renew a result in `folder`."""
    others: tuple[str, ...] = ()
    """Systems that are not freerun, as the names of their rows have them. A change of freerun does not change what they
    do, so those rows depend on the script and on `sources_of_others` alone."""
    sources_of_others: tuple[str, ...] = ()
    algorithms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For rows that name an algorithm: the sources of each. What another algorithm does changes nothing in them."""


BENCHMARKS = {
    "adapting": Benchmark((*TRAINING, "src/freerun/tuning")),
    "atari_learning": Benchmark((*TRAINING, "src/freerun/adapters/images.py"), others=("Stable-Baselines3",)),
    "batched_inference": Benchmark(TRAINING),
    "beside_rsl_rl": Benchmark((*TENSORS, *ON_GPUS), flags=OUTPUT),
    "chaos_storms": Benchmark(
        (*COLLECTING, *ON_RAY, "src/freerun/run", "tests/chaos.py", "tests/sealed_env.py"), ("chaos/chaos.json",)
    ),
    "cyber": Benchmark(
        (*TRAINING, *DEFENCE, "src/freerun/adapters/cyborg.py"),
        ("cyber/cyber-cage2-v0.json", "cyber/cyber-networkdefence-v0.json"),
    ),
    "cyber_learning": Benchmark((*TRAINING, *DEFENCE, "src/freerun/adapters/cyborg.py")),
    "cyborg_costs": Benchmark(("src/freerun/adapters/cyborg.py", "src/freerun/adapters/cyborg_fast.py")),
    "default_flags": Benchmark((*TRAINING, *SAC), others=("EnvPool with 2 threads",), sources_of_others=RUNNERS),
    "default_sizes": Benchmark(TRAINING, others=("Stable-Baselines3",)),
    "dqn_learning": Benchmark((*COLLECTING, "src/freerun/algorithms/dqn"), others=("Stable-Baselines3",)),
    "drone_learning": Benchmark(
        (*TENSORS, "src/freerun/algorithms/fastsac", *MBPO, *ON_GPUS),
        algorithms={
            "ppo": (*TENSORS, *ON_GPUS),
            "fastsac": (*OFF_POLICY_TENSORS, *SAC, "src/freerun/algorithms/fastsac"),
            "mbpo": (*OFF_POLICY_TENSORS, *MBPO, "src/freerun/algorithms/fastsac"),
        },
    ),
    "drone_pilots": Benchmark(("src/freerun_envs/drone_sim.py", "src/freerun_envs/drone_pilots.py")),
    "federation": Benchmark((*TRAINING, *DEFENCE, "src/freerun/tools/federation")),
    "gallery": Benchmark(TENSORS),
    "gradient_ways": Benchmark(PPO),
    "image_actors": Benchmark(
        (
            "src/freerun/algorithms/policies",
            "src/freerun/transport",
            "src/freerun/collecting/workers/slot_workers.py",
        )
    ),
    "image_learner": Benchmark(PPO),
    "isaac_cartpole": Benchmark(
        (
            *(*TRAINING, *ON_TENSORS, "src/freerun/algorithms/fastsac", *MBPO),
            "src/freerun/adapters/isaac_lab.py",
            "tests/isaac/make_assets.py",
        )
    ),
    "learner_speed": Benchmark((*MBPO, *ON_GPUS), flags=OUTPUT),
    "learner_speed_cpu": Benchmark((*PPO, *SAC)),
    "learner_threads": Benchmark(
        (
            *(*TRAINING, *SAC, "src/freerun/run/learner_threads.py"),
            *("src/freerun/run/outputs.py", "src/freerun/settings/factories.py"),  # who gets more threads
        )
    ),
    "learning": Benchmark((*TRAINING, *ON_RAY, *SAC), others=("sb3", "random")),
    "masked_learning": Benchmark((*TRAINING, *DEFENCE), others=("MaskablePPO",), sources_of_others=DEFENCE),
    "matrix": Benchmark(
        (*TRAINING, *ON_RAY),
        tuple(f"bench_{name}/report.json" for name in ("cartpole", "halfcheetah", "network_defence", "straggler")),
        flags="--run --again --only {folder}",
    ),
    "memory_defence": Benchmark((*TRAINING, *DEFENCE)),
    "memory_learning": Benchmark(
        (*TRAINING, "src/freerun_envs/t_maze.py"),
        ("memory_learning/memory_learning.json", "memory_learning/actor_costs.json"),
        others=("RecurrentPPO (LSTM)",),
        sources_of_others=("src/freerun_envs/t_maze.py",),
    ),
    "network_defence": Benchmark((*DEFENCE, "benchmarks/network_defence_cyborg.py")),
    "overhead": Benchmark(COLLECTING),
    "overlap": Benchmark((*COLLECTING, *ON_TENSORS, *SAC, *ON_GPUS), flags=OUTPUT),
    "peers": Benchmark(
        (*TRAINING, *RUNNERS),
        others=(
            *("bare", "bare_ready_actions", "classic_executor", "gymnasium_async", "gymnasium_sync", "sb3_subproc"),
            *("sb3_dummy", "envpool", "tianshou", "sample_factory", "torchrl", "rllib"),
        ),
        sources_of_others=(*RUNNERS, "src/freerun_envs/straggler.py"),
    ),
    "probe_accuracy": Benchmark((*TRAINING, "src/freerun/tools/probe")),
    "ray_straggler": Benchmark((*TRAINING, *ON_RAY), ("ray/ray.json",)),
    "sample_efficiency": Benchmark((*COLLECTING, *MBPO, *ON_GPUS)),
    "scaling": Benchmark((*COLLECTING, *ON_RAY, *PPO)),
    "simulators": Benchmark(
        (*TRAINING, *SIMULATORS),
        flags="--again",
        others=("bare", "sb3"),
        sources_of_others=SIMULATORS,
    ),
    "sweeping": Benchmark((*TRAINING, "src/freerun/tools/sweep"), others=("sb3",)),
    "tensor_modes": Benchmark(
        (*TENSORS, *ON_GPUS),
        ("tensor_modes/tensor_modes.json", "tensor_modes_compile/tensor_modes.json"),
        flags=OUTPUT,
    ),
    "throughput": Benchmark((*TRAINING, *ON_RAY)),
    "time_to_score": Benchmark(
        (*TRAINING, *(f"benchmarks/time_to_score_{part}.py" for part in ("runs", "systems"))),
        others=("sb3", "single-file", "sample-factory"),
        sources_of_others=tuple(
            f"benchmarks/{name}.py"
            for name in (
                "time_to_score_runs",
                "time_to_score_systems",
                "time_to_score_sample_factory",
                "single_file_ppo",
            )
        ),
    ),
    "timeline": Benchmark((*TRAINING, "src/freerun/telemetry")),
    "watching": Benchmark((*TRAINING, "src/freerun/telemetry", "src/freerun/tools/watch")),
    "workflow_search": Benchmark(
        (*TRAINING, *DEFENCE, "src/freerun/tools/workflow_search"),
        ("workflow_search/workflow_search.json", "workflow_search/searches.json"),
    ),
}


def result_files(name: str) -> list[Path]:
    """Return the result files of a benchmark, whether or not they exist."""
    return [RESULTS / file for file in BENCHMARKS[name].files or (f"{name}/{name}.json",)]


def sources_of(path: Path, row: str = "") -> tuple[str, ...]:
    """Return the sources that a row of a result file depends on. The file may lie in any folder: its name decides."""
    for name, benchmark in BENCHMARKS.items():
        if path.name in (file.name for file in result_files(name)):
            is_other = any(part in benchmark.others for part in row.split(", "))
            sources = benchmark.sources_of_others if is_other else benchmark.sources
            named = [of_one for word, of_one in benchmark.algorithms.items() if word in re.split(r"\W+", row)]
            return (f"benchmarks/{name}.py", *(named[0] if named else sources))
    raise SystemExit(f"{path.name} belongs to no benchmark: add it to benchmarks/catalogue.py.")


@functools.cache
def fingerprint(sources: tuple[str, ...]) -> str:
    """Return a digest of these files and folders without comments, docstrings and functions that only write pages.

    It is made of lines, not of syntax trees, because those differ between versions of Python.
    """
    digest = hashlib.sha256()
    for source in sources:
        path = REPOSITORY / source
        files = sorted(file for file in path.rglob("*") if file.suffix in (".py", *C)) if path.is_dir() else [path]
        assert files, f"there is no {source}"
        for file in files:
            digest.update(file.relative_to(REPOSITORY).as_posix().encode())
            text = file.read_text(encoding="utf-8")
            is_python = file.suffix not in C
            lines = lines_that_compute(text, file.is_relative_to(RESULTS.parent)) if is_python else text.splitlines()
            for line in lines:
                digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:8]


def lines_that_compute(source: str, is_benchmark: bool) -> Iterator[str]:
    """Return the lines of a module that can change a result."""
    tree, left_out = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for node in tree.body if is_benchmark else ():
        if isinstance(node, ast.FunctionDef) and node.name.startswith(WRITES_PAGES):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(source.splitlines(), start=1):
        if number not in left_out and line.strip() and not line.lstrip().startswith("#"):
            yield MENDED_LINES.get(line.rstrip(), line.rstrip())
