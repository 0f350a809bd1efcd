"""What time_to_score.py compares: the tasks, their settings, and how each system runs them.

Every run leaves the same two files in its folder, whatever the system: config.json, written when all is built and
nothing has been stepped, and metrics.jsonl, a line after each update with step, wall_seconds, episodes, return_mean.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Learning:
    """The hyper-parameters that all systems learn a task with; named as in `freerun.train`."""

    steps_per_update: int
    minibatch_size: int
    num_epochs: int
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    normalize_obs: bool = False
    normalize_reward: bool = False
    initial_log_std: float = 0.0


@dataclass(frozen=True)
class Task:
    score: float
    """Mean return of the last 100 training episodes that counts as reached."""
    max_steps: int
    max_seconds: float
    """A run that has not reached the score by then ends as not reached."""
    num_envs: int
    """For the systems that step a vector of environments; freerun's number is in FREERUN."""
    learning: Learning


TASKS = {
    "CartPole-v1": Task(475, 200_000, 120, 8, Learning(2048, 256, 10, learning_rate=1e-3, gamma=0.98)),
    # As tuned for Stable-Baselines3 in its zoo, which has the same reference score.
    "LunarLander-v3": Task(
        200, 1_500_000, 480, 16, Learning(16_384, 64, 4, gamma=0.999, gae_lambda=0.98, entropy_coef=0.01)
    ),
    # Minibatch size, discount and lambda: the best of five settings, each tried for one or two minutes of single-file
    # PPO. Actions that deviate by 1 at first left freerun at 1500 with seeds 0 and 1; -2 is what SB3's zoo has.
    "HalfCheetah-v5": Task(
        2000,
        1_000_000,
        540,
        8,
        Learning(
            2000,
            125,
            10,
            learning_rate=5e-4,
            gamma=0.98,
            gae_lambda=0.92,
            normalize_obs=True,
            normalize_reward=True,
            initial_log_std=-2.0,
        ),
    ),
}

# Arguments of `freerun.train`, beside those of Learning, which they may override. Two workers, and as many environments
# and steps of each in an update as the others have.
FREERUN: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"mode": "freerun", "max_lag": 1, "num_workers": 2, "envs_per_worker": 4, "segment_steps": 256},
    "LunarLander-v3": {"mode": "freerun", "max_lag": 1, "num_workers": 2, "envs_per_worker": 8, "segment_steps": 1024},
    "HalfCheetah-v5": {
        "mode": "freerun",
        "max_lag": 1,
        "num_workers": 2,
        "envs_per_worker": 4,
        "segment_steps": 250,
        "normalize_advantage": True,  # as the others do; its default for so many environments is another
    },
}

# ---------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Run:
    """All that a system must know to run."""

    task: str
    seed: int
    max_steps: int
    settings: dict[str, Any]
    folder: Path
    """Where config.json and metrics.jsonl go."""


class Metrics:
    """metrics.jsonl of the systems that do not write it themselves, with freerun's names."""

    def __init__(self, run: Run):
        self._run = run
        self._file = (run.folder / "metrics.jsonl").open("w", buffering=1, encoding="utf-8")
        self._started = time.perf_counter()

    def start(self) -> None:
        """The clock starts: everything is built."""
        (self._run.folder / "config.json").write_text(json.dumps(self._run.settings) + "\n", encoding="utf-8")
        self._started = time.perf_counter()

    def write(self, step: int, episodes: int, return_mean: float | None) -> None:
        seconds = time.perf_counter() - self._started
        line = {"step": step, "wall_seconds": seconds, "episodes": episodes, "return_mean": return_mean}
        self._file.write(json.dumps(line) + "\n")


def run_freerun(run: Run) -> None:
    import freerun

    freerun.train(run.task, **run.settings, total_steps=run.max_steps, seed=run.seed, run_dir=run.folder, quiet=True)


def run_single_file(run: Run) -> None:
    import single_file_ppo
    import torch

    torch.set_num_threads(1)
    metrics = Metrics(run)
    single_file_ppo.train(
        single_file_ppo.Arguments(env=run.task, seed=run.seed, total_steps=run.max_steps, **run.settings),
        on_start=metrics.start,
        on_update=lambda now: metrics.write(now.step, now.episodes, now.return_mean if now.episodes else None),
    )


def run_sb3(run: Run) -> None:
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

    torch.set_num_threads(1)
    settings, metrics = run.settings, Metrics(run)

    class AfterUpdate(BaseCallback):
        num_episodes = 0

        def _on_step(self) -> bool:
            self.num_episodes += int(sum(self.locals["dones"]))
            return True

        def _on_rollout_start(self) -> None:
            """The first is before the first update; the others follow one."""
            if self.num_timesteps:
                recent = [episode["r"] for episode in self.model.ep_info_buffer or ()]
                metrics.write(self.num_timesteps, self.num_episodes, sum(recent) / len(recent) if recent else None)

        def _on_training_end(self) -> None:
            self._on_rollout_start()

    # The monitor sits below the normaliser: returns are those of the environment.
    envs: VecEnv = DummyVecEnv([lambda: Monitor(gymnasium.make(run.task))] * settings["num_envs"])
    if settings["normalize_obs"] or settings["normalize_reward"]:
        envs = VecNormalize(
            envs,
            norm_obs=settings["normalize_obs"],
            norm_reward=settings["normalize_reward"],
            gamma=settings["gamma"],
        )
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=settings["steps_per_update"] // settings["num_envs"],
        learning_rate=settings["learning_rate"],
        n_epochs=settings["num_epochs"],
        batch_size=settings["minibatch_size"],
        gamma=settings["gamma"],
        gae_lambda=settings["gae_lambda"],
        clip_range=settings["clip_range"],
        ent_coef=settings["entropy_coef"],
        vf_coef=settings["value_coef"],
        max_grad_norm=settings["max_grad_norm"],
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
            "log_std_init": settings.get("initial_log_std", 0.0),
        },
        stats_window_size=100,
        seed=run.seed,
        device="cpu",
    )
    metrics.start()
    model.learn(run.max_steps, callback=AfterUpdate())


SAMPLE_FACTORY_PYTHON = Path(__file__).parents[1] / "build" / "peers" / "sample_factory" / "bin" / "python"


def run_sample_factory(run: Run) -> None:
    """It needs an older NumPy: its own interpreter takes this process over, cores and all."""
    script = Path(__file__).with_name("time_to_score_sample_factory.py")
    arguments = json.dumps({**asdict(run), "folder": str(run.folder)})
    os.execv(SAMPLE_FACTORY_PYTHON, [str(SAMPLE_FACTORY_PYTHON), str(script), arguments])


# ---------------------------------------------------------------------------------------------- systems


@dataclass(frozen=True)
class System:
    label: str
    run: Callable[[Run], None]

    def settings(self, task: str) -> dict[str, Any]:
        """All that decides how it learns the task."""
        learning = asdict(TASKS[task].learning)
        if not learning["initial_log_std"]:
            del learning["initial_log_std"]  # where it does not matter, so that earlier runs stay comparable
        if self.run is run_freerun:
            return {**learning, **FREERUN[task]}
        return {**learning, "num_envs": TASKS[task].num_envs}


REFERENCE = "freerun"
SYSTEMS = {
    REFERENCE: System("freerun", run_freerun),
    "sb3": System("Stable-Baselines3", run_sb3),
    "single-file": System("single-file PPO", run_single_file),
    "sample-factory": System("Sample Factory", run_sample_factory),
}


def num_envs(settings: dict[str, Any]) -> int:
    """Environments that exist at a time."""
    if "num_workers" in settings:
        return int(settings["num_workers"]) * int(settings.get("envs_per_worker", 1))
    return int(settings["num_envs"])


@functools.cache
def why_absent(system: str, task: str) -> str | None:
    """A sentence if the system cannot run the task here."""
    if SYSTEMS[system].run is not run_sample_factory:
        return None
    if not SAMPLE_FACTORY_PYTHON.exists():
        return "Sample Factory is left out: it has no virtual environment under build/peers/sample_factory."
    attempt = "import gymnasium, sample_factory, sys; gymnasium.make(sys.argv[1])"
    result = subprocess.run([SAMPLE_FACTORY_PYTHON, "-c", attempt, task], capture_output=True, text=True)
    if result.returncode:
        error = result.stderr.strip().splitlines()[-1].partition(":")[0]
        return f"Sample Factory is left out of {task}: its virtual environment cannot make it ({error})."
    return None


def main() -> None:
    """A run in this process, on the given cores; time_to_score_runs.Job starts it."""
    system, run, cores = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    # A shell that starts the benchmark in the background has it ignore Ctrl-C, by which runs are ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, cores)
    folder = Path(run["folder"])
    folder.mkdir()
    SYSTEMS[system].run(Run(**{**run, "folder": folder}))


if __name__ == "__main__":
    main()
