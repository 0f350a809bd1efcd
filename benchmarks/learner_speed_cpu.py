"""How long does one gradient step take on a CPU? freerun's two learners beside torch.compile, Stable-Baselines3 and,
for PPO, a single file, on the same networks, minibatches and rows, with one thread each.

PPO has 52 observations, 145 choices and 64-64 networks (the shapes of CAGE challenge 2). SAC has 17 observations, 6
actions and 256-256 networks (the shapes of HalfCheetah). A whole update is timed, with all drawing of minibatches, and
divided by its gradient steps. The contenders take turns within each repetition, and ratios are those of one repetition.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import single_file_ppo
import torch
import tyro
from gymnasium import spaces
from run_file import ResultFile, write_report
from threadpoolctl import threadpool_info, threadpool_limits

from freerun.algorithms.policies.networks import ActorCritic, flatten_parameters
from freerun.algorithms.ppo.gradient_steps import AutogradSteps, ProximalTerm
from freerun.algorithms.ppo.objective import PPOLosses, ppo_losses
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig, with_sizes
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.algorithms.sac.sac import SAC
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.core import Acceleration, EnvSpec, Segment, SingleLearner
from freerun.tools.bench.load_meter import processor

Algorithm = Literal["ppo", "sac"]
PPOLearner = Literal["fast", "numpy", "torch"]
OBS_SIZE, NUM_CHOICES, NUM_EPOCHS = 52, 145, 10
SPEC = EnvSpec(spaces.Box(0, 1, (OBS_SIZE,), np.float32), spaces.Discrete(NUM_CHOICES))
SAC_OBS_SIZE, SAC_ACTION_SIZE = 17, 6
SAC_SPEC = EnvSpec(
    spaces.Box(-np.inf, np.inf, (SAC_OBS_SIZE,), np.float32), spaces.Box(-1, 1, (SAC_ACTION_SIZE,), np.float32)
)
NUM_STORED_STEPS, NUM_SAC_STEPS = 20_000, 50
"""Steps in the replay buffers, and gradient steps in an update of SAC."""
NOTES = {
    "ppo": "PPO: 52 observations, 145 choices, 64-64 networks",
    "sac": "SAC: 17 observations, 6 actions, 256-256 networks",
}
Update = Callable[[], int]
"""Makes one update and returns the number of its gradient steps."""


@dataclass(frozen=True)
class Options:
    algorithms: tuple[Algorithm, ...] = ("ppo", "sac")
    """Which algorithms to measure. The results of the others stay in the files as they are."""
    minibatch_sizes: tuple[int, ...] = (64, 256, 2500)
    """Rows per gradient step of PPO."""
    batch_sizes: tuple[int, ...] = (64, 256)
    """Rows per gradient step of SAC."""
    entropy_coef: float = 0.01
    """Weight of PPO's entropy bonus, in all of them."""
    repeats: int = 7
    """Repetitions; each contender makes one update in each."""
    note: str = ""
    """A sentence for the results, such as what else the machine was doing."""
    output: Path = Path(__file__).parent / "results" / "learner_speed_cpu"


class Rows:
    """The same made-up steps for everyone."""

    def __init__(self, num_rows: int):
        rng = np.random.default_rng(0)
        self.obs = rng.integers(0, 2, (num_rows, OBS_SIZE)).astype(np.float32)
        self.action = rng.integers(0, NUM_CHOICES, num_rows)
        self.log_prob = np.full(num_rows, -np.log(NUM_CHOICES), np.float32)
        self.reward = rng.standard_normal(num_rows, np.float32)


def freerun_update(rows: Rows, minibatch_size: int, options: Options, learner: PPOLearner) -> Update:
    config = PPOConfig(
        minibatch_size=minibatch_size,
        num_epochs=NUM_EPOCHS,
        entropy_coef=options.entropy_coef,
        normalize_reward=False,  # the others' updates do not normalise
        learner=learner,
    )
    ppo = PPO(SPEC, config, 0, "cpu", False)
    num_rows = len(rows.reward)
    number, no = np.zeros((num_rows, 1), np.int64), np.zeros((num_rows, 1), np.bool_)
    obs, action = rows.obs[:, None], rows.action[:, None]
    segment = Segment(obs, action, rows.log_prob[:, None], rows.reward[:, None], no, no, obs, number, number, 0.0)

    def update() -> int:
        ppo.observe([segment])
        return int(ppo.update(0, 0.0)["num_gradient_steps"])

    return update


def compiled_update(rows: Rows, minibatch_size: int, options: Options) -> Update:
    """freerun's losses, fused by torch.compile; everything else as in its torch learner."""
    config = with_sizes(PPOConfig(minibatch_size=minibatch_size, entropy_coef=options.entropy_coef))
    assert config.learning_rate is not None
    net = ActorCritic(PPO(SPEC, config, 0, "cpu", False).net.spec)
    weights = flatten_parameters(net)
    optimizer = torch.optim.Adam([weights], config.learning_rate, eps=1e-5, fused=True)
    steps = AutogradSteps(net, weights, optimizer, SingleLearner(), torch.zeros(1), ProximalTerm(weights))
    fused: Callable[..., PPOLosses] = torch.compile(lambda *columns: ppo_losses(net, config, TrainingBatch(*columns)))
    one = torch.ones(len(rows.reward))
    reward = torch.from_numpy(rows.reward)
    columns = (torch.from_numpy(rows.obs), torch.from_numpy(rows.action), torch.from_numpy(rows.log_prob), one)
    batch = TrainingBatch(*columns, reward, reward, reward)

    def update() -> int:
        num_steps = 0
        for _ in range(NUM_EPOCHS):
            for picked in torch.randperm(len(reward)).split(minibatch_size):  # type: ignore[no-untyped-call]
                steps.descend_loss(config, fused(*batch.select(picked)))
                num_steps += 1
        return num_steps

    return update


def sb3_update(rows: Rows, minibatch_size: int, options: Options) -> Update:
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    class Shapes(gymnasium.Env[Any, Any]):
        observation_space, action_space = SPEC.observation_space, SPEC.action_space

    num_rows = len(rows.reward)
    model = stable_baselines3.PPO(
        "MlpPolicy",
        Shapes(),
        n_steps=num_rows,
        batch_size=minibatch_size,
        n_epochs=NUM_EPOCHS,
        ent_coef=options.entropy_coef,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    buffer = model.rollout_buffer
    for row in range(num_rows):
        buffer.add(
            rows.obs[row],
            rows.action[row],
            rows.reward[row],
            np.zeros(1),
            torch.zeros(1),
            torch.from_numpy(rows.log_prob[row : row + 1]),
        )
    buffer.compute_returns_and_advantage(torch.zeros(1), np.zeros(1))

    def update() -> int:
        model.train()
        return NUM_EPOCHS * num_rows // minibatch_size

    return update


def single_file_update(rows: Rows, minibatch_size: int, options: Options) -> Update:
    arguments = single_file_ppo.Arguments(
        minibatch_size=minibatch_size, num_epochs=NUM_EPOCHS, entropy_coef=options.entropy_coef
    )
    agent = single_file_ppo.Agent(OBS_SIZE, spaces.Discrete(NUM_CHOICES), 0.0)
    optimizer = torch.optim.Adam(agent.parameters(), arguments.learning_rate, eps=1e-5)
    reward, ended = rows.reward[:, None], np.zeros((len(rows.reward), 1), np.bool_)
    obs, action, log_prob = rows.obs[:, None], rows.action[:, None], rows.log_prob[:, None]
    rollout = single_file_ppo.Rollout(obs, action, log_prob, np.zeros_like(reward), reward, ended)

    def update() -> int:
        single_file_ppo.learn(agent, optimizer, rollout, reward, arguments)
        return NUM_EPOCHS * len(rows.reward) // minibatch_size

    return update


class StoredSteps:
    """The same made-up steps in everyone's replay buffer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.obs, self.next_obs = (rng.standard_normal((NUM_STORED_STEPS, SAC_OBS_SIZE), np.float32) for _ in range(2))
        self.action = rng.uniform(-1, 1, (NUM_STORED_STEPS, SAC_ACTION_SIZE)).astype(np.float32)
        self.reward = rng.standard_normal(NUM_STORED_STEPS, np.float32)


def freerun_sac_update(
    stored: StoredSteps, batch_size: int, learner: Literal["fast", "torch"], acceleration: Acceleration = "none"
) -> Update:
    config = SACConfig(batch_size=batch_size, buffer_size=NUM_STORED_STEPS, learner=learner, acceleration=acceleration)
    sac = SAC(SAC_SPEC, config, 0, "cpu", False)
    number, no = np.zeros((NUM_STORED_STEPS, 1), np.int64), np.zeros((NUM_STORED_STEPS, 1), np.bool_)
    obs, action, reward, next_obs = (
        part[:, None] for part in (stored.obs, stored.action, stored.reward, stored.next_obs)
    )
    sac.observe([Segment(obs, action, np.zeros_like(reward), reward, no, no, next_obs, number, number, 0.0)])

    def update() -> int:
        sac.take_gradient_steps(NUM_SAC_STEPS)
        return NUM_SAC_STEPS

    return update


def sb3_sac_update(stored: StoredSteps, batch_size: int) -> Update:
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    class SACShapes(gymnasium.Env[Any, Any]):
        observation_space, action_space = SAC_SPEC.observation_space, SAC_SPEC.action_space

    model = stable_baselines3.SAC("MlpPolicy", SACShapes(), buffer_size=NUM_STORED_STEPS, device="cpu")
    model.set_logger(Logger(None, []))
    assert model.replay_buffer is not None
    for row in range(NUM_STORED_STEPS):
        model.replay_buffer.add(
            stored.obs[row], stored.next_obs[row], stored.action[row], stored.reward[row], np.zeros(1), [{}]
        )

    def update() -> int:
        model.train(NUM_SAC_STEPS, batch_size)
        return NUM_SAC_STEPS

    return update


def contenders(algorithm: Algorithm, size: int, options: Options) -> dict[str, Update]:
    if algorithm == "ppo":
        rows = Rows(size * max(4, 2048 // size))
        made = {
            "freerun fast": freerun_update(rows, size, options, "fast"),
            "freerun numpy": freerun_update(rows, size, options, "numpy"),
            "freerun torch": freerun_update(rows, size, options, "torch"),
            "torch.compile": compiled_update(rows, size, options),
            "Stable-Baselines3": sb3_update(rows, size, options),
            "single file": single_file_update(rows, size, options),
        }
    else:
        stored = StoredSteps()
        made = {
            "freerun fast": freerun_sac_update(stored, size, "fast"),
            "freerun torch": freerun_sac_update(stored, size, "torch"),
            "torch.compile": freerun_sac_update(stored, size, "torch", "compile"),
            "Stable-Baselines3": sb3_sac_update(stored, size),
        }
    for update in made.values():
        update()  # the first one allocates memory, and compiles
    return made


def measure(algorithm: Algorithm, size: int, options: Options) -> dict[str, list[float]]:
    """Milliseconds per gradient step."""
    made = contenders(algorithm, size, options)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.repeats):
        for name, update in made.items():
            began = time.perf_counter()
            num_steps = update()
            times[name].append(1000 * (time.perf_counter() - began) / num_steps)
    return times


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "# One gradient step on a CPU",
        "",
        "Milliseconds per gradient step, with one thread: median (lowest – highest) over updates; then how many times "
        "as fast `freerun fast` is: median of the ratios within a repetition. `freerun numpy` is the same without the "
        "compiled kernel of PPO, and `torch.compile` is freerun's torch learner, compiled. "
        "`benchmarks/learner_speed_cpu.py` wrote this.",
        "",
    ]
    for algorithm, note in NOTES.items():
        if algorithm not in results:
            continue
        found = results[algorithm]
        machine = (
            f"{found['machine']}, torch {found['torch']}, numpy {found['numpy']} with OpenBLAS for {found['kernels']}"
        )
        lines += [
            f"## {note}",
            "",
            f"{machine}; {found['repeats']} updates of each. {found.get('note', '')}".rstrip(),
            "",
        ]
        for size, times in found["times"].items():
            lines += [f"### Minibatches of {size}", "", "| | ms | freerun fast is faster by |", "| --- | ---: | ---: |"]
            for name, taken in times.items():
                ratio = statistics.median(a / b for a, b in zip(taken, times["freerun fast"], strict=True))
                shown = f"{statistics.median(taken):.2f} ({min(taken):.2f} – {max(taken):.2f})"
                lines.append(f"| {name} | {shown} | {ratio:.2f} × |")
            lines.append("")
    return "\n".join(lines)


def numpy_kernels() -> str:
    """The processor family whose kernels numpy's OpenBLAS uses; scipy may have loaded another OpenBLAS."""
    found = [one for one in threadpool_info() if one["internal_api"] == "openblas" and "numpy" in one["filepath"]]
    return str(found[0]["architecture"]) if found else "unknown"


def row_name(algorithm: str, size: str) -> str:
    return f"{algorithm}, minibatches of {size}"


def open_results(folder: Path) -> ResultFile:
    def rows(results: dict[str, Any]) -> list[str]:
        return [row_name(algorithm, size) for algorithm, found in results.items() for size in found["times"]]

    return ResultFile(folder / "learner_speed_cpu.json", {}, rows)


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "learner_speed_cpu.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    threadpool_limits(1, "blas")
    file = open_results(options.output)
    results: dict[str, Any] = file.content
    measured = []
    for algorithm in options.algorithms:
        sizes = options.minibatch_sizes if algorithm == "ppo" else options.batch_sizes
        earlier = results.get(algorithm, {}).get("times", {})
        measured += [row_name(algorithm, str(size)) for size in sizes]
        results[algorithm] = {
            "machine": processor(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            # numpy multiplies with the kernels of a processor family, which OPENBLAS_CORETYPE may have forced on it.
            "kernels": numpy_kernels(),
            "repeats": options.repeats,
            "note": options.note,
            "times": {**earlier, **{str(size): measure(algorithm, size, options) for size in sizes}},
        }
    file.save(*measured)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
