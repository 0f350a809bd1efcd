"""Weights & Biases' sweeps and Ray Tune with the ordinary flags and callbacks, without any network."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import preloaded_python
import pytest

import freerun

SHORT = ["--total-steps", "400", "--steps-per-update", "200", "--num-workers", "1", "-q"]


def test_the_command_of_a_weights_and_biases_agent(tmp_path: Path) -> None:
    """The agent itself talks to a server. What it would run is made by the package's own function."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    chosen = {"learning-rate": {"value": 0.00123}, "num_epochs": {"value": 2}, "activation": {"value": "relu"}}
    words = create_sweep_command_args({"args": chosen})["args"]
    assert words == ["--learning-rate=0.00123", "--num_epochs=2", "--activation=relu"]
    # As the agent sets it for the run, which has a process of its own: W&B reads such variables once per process.
    environment = {**os.environ, "WANDB_SWEEP_ID": "sweep123"}
    own = ["--track", "wandb", "--wandb-mode", "offline", "--run-dir", str(tmp_path)]
    finished = preloaded_python.run("-m", "freerun", "train", "CartPole-v1", *SHORT, *own, *words, env=environment)
    assert finished.returncode == 0, finished.stderr
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["learning_rate"], config["num_epochs"], config["activation"]) == (0.00123, 2, "relu")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    # The metric that the sweep maximises. W&B's own process writes it in its own time.
    while b"Train/mean_reward" not in (content := file.read_bytes()):
        assert time.monotonic() < deadline, content
        time.sleep(0.1)
    assert b"sweep123" in content


@pytest.mark.timeout(300)
def test_ray_tune_hears_of_every_update(ray_nodes: Any, tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune", reason="pip install 'ray[tune]'", exc_type=ImportError)

    def trainable(config: dict[str, Any]) -> None:  # here, because actors cannot import this file
        def report(update: freerun.Update) -> None:
            tune.report({"return_mean": update.metrics["return_mean"], "step": update.step})

        freerun.train("CartPole-v1", total_steps=600, steps_per_update=200, on_update=report, **config)

    space = {"learning_rate": tune.grid_search([1e-3, 3e-3]), "mode": "sequential", "hidden_sizes": (8,), "quiet": True}
    space["run_dir"] = tune.sample_from(lambda spec: str(tmp_path / f"rate-{spec.config.learning_rate}"))
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(metric="return_mean", mode="max"),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    for result in results:
        assert result.metrics["training_iteration"] == 3
        summary = json.loads((Path(result.config["run_dir"]) / "summary.json").read_text())
        assert result.metrics["return_mean"] == summary["mean_return"]
        assert result.metrics["step"] == summary["env_steps"]
    assert results.get_best_result().config["learning_rate"] in (1e-3, 3e-3)
