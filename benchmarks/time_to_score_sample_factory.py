"""Sample Factory's side of time_to_score.py, run by the interpreter of its own virtual environment.

NumPy is older there, and so may Gymnasium be: nothing here may need more than they have.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver, Runner  # type: ignore[import-not-found]
from sample_factory.algo.utils.misc import ExperimentStatus  # type: ignore[import-not-found]
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # type: ignore[import-not-found]
from sample_factory.envs.env_utils import register_env  # type: ignore[import-not-found]
from sample_factory.train import make_runner  # type: ignore[import-not-found]
from time_to_score_systems import Run

# On two cores its learner takes one: some 65,000 steps of CartPole took 12.8 to 18.5 s with one worker and 14.8 to
# 25.0 s with two, four runs of each, on a machine that had other work as well.
NUM_WORKERS = 1
NO_VALUE_CLIPPING = 1e6


class StartsTheClock(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Components start one after another in many processes: training has begun when an environment is stepped."""

    def __init__(self, env: gymnasium.Env[Any, Any], config: Path):
        super().__init__(env)
        self._config, self._started = config, False

    def step(self, action: Any) -> Any:
        if not self._started:
            self._started = True
            if not self._config.exists():
                self._config.touch()
        return self.env.step(action)


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    env: gymnasium.Env[Any, Any] = gymnasium.make(name, render_mode=render_mode)
    if isinstance(env.action_space, gymnasium.spaces.Box):
        env = gymnasium.wrappers.ClipAction(env)  # as the other systems do
    return StartsTheClock(env, Path(cfg.train_dir) / "config.json")


class AfterUpdate(AlgoObserver):  # type: ignore[misc]
    """Writes metrics.jsonl."""

    def __init__(self, run: Run):
        self._run = run
        self._file = (run.folder / "metrics.jsonl").open("w", buffering=1, encoding="utf-8")
        self._num_episodes = 0
        self._recent: deque[float] = deque(maxlen=100)

    def on_episode(self, runner: Any, message: dict[str, Any], policy: int) -> None:
        self._num_episodes += 1
        self._recent.append(float(message["episodic"]["reward"]))

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        line = {
            "step": training_iteration_since_resume * self._run.settings["steps_per_update"],
            "wall_seconds": time.time() - (self._run.folder / "config.json").stat().st_mtime,
            "episodes": self._num_episodes,
            "return_mean": sum(self._recent) / len(self._recent) if self._recent else None,
        }
        self._file.write(json.dumps(line) + "\n")


def flags(run: Run) -> list[str]:
    """The shared hyper-parameters in its own words; what they do not cover is as near to the others as it can be."""
    settings = run.settings
    # Minibatches are made of whole rollouts: of longer ones it makes empty batches, and learns nothing.
    rollout = math.gcd(settings["steps_per_update"] // settings["num_envs"], settings["minibatch_size"])
    values = {
        "env": run.task,
        "experiment": "sample_factory",
        "train_dir": run.folder,
        "device": "cpu",
        "seed": run.seed,
        "train_for_env_steps": run.max_steps,
        "num_workers": NUM_WORKERS,
        "num_envs_per_worker": settings["num_envs"] // NUM_WORKERS,
        "rollout": rollout,
        "batch_size": settings["minibatch_size"],
        "num_batches_per_epoch": settings["steps_per_update"] // settings["minibatch_size"],
        "num_epochs": settings["num_epochs"],
        "shuffle_minibatches": True,
        "learning_rate": settings["learning_rate"],
        "adam_eps": 1e-5,
        "initial_stddev": math.exp(settings.get("initial_log_std", 0.0)),
        "gamma": settings["gamma"],
        "gae_lambda": settings["gae_lambda"],
        "ppo_clip_ratio": settings["clip_range"],
        "ppo_clip_value": NO_VALUE_CLIPPING,
        "exploration_loss_coeff": settings["entropy_coef"],
        "value_loss_coeff": settings["value_coef"],
        "max_grad_norm": settings["max_grad_norm"],
        "normalize_input": settings["normalize_obs"],
        "normalize_returns": settings["normalize_reward"],
        "value_bootstrap": True,
        "use_rnn": False,
        "nonlinearity": "tanh",
        "actor_critic_share_weights": False,
        "adaptive_stddev": False,
        "decorrelate_envs_on_one_worker": False,
        # It would spread its workers over all cores of the machine, and runs are bound to cores of their own.
        "set_workers_cpu_affinity": False,
        "log_to_file": False,
    }
    return [*(f"--{name}={value}" for name, value in values.items()), "--encoder_mlp_layers", "64", "64"]


def main() -> None:
    content = json.loads(sys.argv[1])
    run = Run(**{**content, "folder": Path(content["folder"])})
    packages = ("sample-factory", "torch", "numpy", "gymnasium", "mujoco")
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
    (run.folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")
    register_env(run.task, make_env)
    arguments = flags(run)
    parser, _ = parse_sf_args(arguments)
    runner: Runner
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    observer = AfterUpdate(run)
    runner.register_observer(observer)
    runner.register_episodic_stats_handler(observer.on_episode)
    if runner.init() != ExperimentStatus.SUCCESS or runner.run() == ExperimentStatus.FAILURE:
        raise SystemExit("Sample Factory says that the run failed, see above")


if __name__ == "__main__":
    main()
