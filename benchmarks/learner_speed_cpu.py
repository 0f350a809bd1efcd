"""How long does one gradient step of PPO take on a CPU? freerun's two learners beside torch.compile, Stable-Baselines3
and a single-file PPO, on the same networks, minibatches and rows, with one thread each.

52 observations, 145 choices, 64-64 networks (the shapes of CAGE challenge 2). A whole update is timed, and divided by
its gradient steps. The contenders take turns within each repetition, and ratios are those of one repetition.
"""

from __future__ import annotations

import json
import platform
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
from threadpoolctl import threadpool_limits

from freerun.algorithms.policies.networks import ActorCritic, flatten_parameters
from freerun.algorithms.ppo.gradient_steps import AutogradSteps
from freerun.algorithms.ppo.objective import PPOLosses, ppo_losses
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig, with_sizes
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import EnvSpec, Segment, SingleLearner

OBS_SIZE, NUM_CHOICES, NUM_EPOCHS = 52, 145, 10
SPEC = EnvSpec(spaces.Box(0, 1, (OBS_SIZE,), np.float32), spaces.Discrete(NUM_CHOICES))
Update = Callable[[], int]
"""Makes one update and returns the number of its gradient steps."""


@dataclass(frozen=True)
class Options:
    minibatch_sizes: tuple[int, ...] = (64, 256, 2500)
    """Rows per gradient step."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus, in all of them."""
    repeats: int = 7
    """Repetitions; each contender makes one update in each."""
    output: Path = Path(__file__).parent / "results" / "learner_speed_cpu"


class Rows:
    """The same made-up steps for everyone."""

    def __init__(self, num_rows: int):
        rng = np.random.default_rng(0)
        self.obs = rng.integers(0, 2, (num_rows, OBS_SIZE)).astype(np.float32)
        self.action = rng.integers(0, NUM_CHOICES, num_rows)
        self.log_prob = np.full(num_rows, -np.log(NUM_CHOICES), np.float32)
        self.reward = rng.standard_normal(num_rows, np.float32)


def freerun_update(rows: Rows, minibatch_size: int, options: Options, learner: Literal["fast", "torch"]) -> Update:
    config = PPOConfig(
        minibatch_size=minibatch_size, num_epochs=NUM_EPOCHS, entropy_coef=options.entropy_coef, learner=learner
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
    steps = AutogradSteps(net, weights, optimizer, SingleLearner(), torch.zeros(1))
    fused: Callable[..., PPOLosses] = torch.compile(lambda *columns: ppo_losses(net, config, TrainingBatch(*columns)))
    one = torch.ones(len(rows.reward))
    reward = torch.from_numpy(rows.reward)
    columns = (torch.from_numpy(rows.obs), torch.from_numpy(rows.action), torch.from_numpy(rows.log_prob), one)
    batch = TrainingBatch(*columns, reward, reward)

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


def contenders(minibatch_size: int, options: Options) -> dict[str, Update]:
    rows = Rows(minibatch_size * max(4, 2048 // minibatch_size))
    made = {
        "freerun fast": freerun_update(rows, minibatch_size, options, "fast"),
        "freerun torch": freerun_update(rows, minibatch_size, options, "torch"),
        "torch.compile": compiled_update(rows, minibatch_size, options),
        "Stable-Baselines3": sb3_update(rows, minibatch_size, options),
        "single file": single_file_update(rows, minibatch_size, options),
    }
    for update in made.values():
        update()  # the first one allocates memory, and compiles
    return made


def measure(minibatch_size: int, options: Options) -> dict[str, list[float]]:
    """Milliseconds per gradient step."""
    made = contenders(minibatch_size, options)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.repeats):
        for name, update in made.items():
            began = time.perf_counter()
            num_steps = update()
            times[name].append(1000 * (time.perf_counter() - began) / num_steps)
    return times


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "# One gradient step of PPO on a CPU",
        "",
        f"{results['machine']}, torch {results['torch']}, numpy {results['numpy']}, one thread. Milliseconds per "
        f"gradient step: median (lowest – highest) of {results['repeats']} updates; then how many times as fast "
        "`freerun fast` is: median of the ratios within a repetition. `benchmarks/learner_speed_cpu.py` wrote this.",
        "",
    ]
    for size, times in results["times"].items():
        lines += [f"## Minibatches of {size}", "", "| | ms | freerun fast is faster by |", "| --- | ---: | ---: |"]
        for name, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found, times["freerun fast"], strict=True))
            shown = f"{statistics.median(found):.2f} ({min(found):.2f} – {max(found):.2f})"
            lines.append(f"| {name} | {shown} | {ratio:.2f} × |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    threadpool_limits(1, "blas")
    results: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "repeats": options.repeats,
        "times": {str(size): measure(size, options) for size in options.minibatch_sizes},
    }
    text = markdown(results)
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "learner_speed_cpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.output / "learner_speed_cpu.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
