"""Many workflows over one pool of workers: as if each were trained alone, with a table that can be continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from worker_processes import workers

from freerun import experiment, training
from freerun.core import UserError
from freerun.run import series
from freerun.settings.registry import make_config
from freerun.tools.cli.main import main

ORDERS = ("op_server,enterprise,op_host,defender,user", "user,defender,op_host,enterprise,op_server")
SETTINGS: dict[str, Any] = {
    "env": "freerun/NetworkDefence-v0",
    "episode_steps": 10,
    "total_episodes": 12,
    "episodes_per_update": 6,
    "num_epochs": 2,
    "hidden_sizes": (8,),
    "quiet": True,
    "seed": 2,
}


def config(folder: Path, **more: Any) -> Any:
    return make_config({**SETTINGS, "workflow": ORDERS, "mode": "pipes", "num_workers": 2, "run_dir": folder, **more})


def weights(run_dir: Path) -> dict[str, Any]:
    return load_file(run_dir / "policy.safetensors")


def test_each_is_trained_as_if_it_were_alone(tmp_path: Path) -> None:
    results = series.run_series(config(tmp_path / "series", deterministic=True))
    assert len(results) == 2
    for order, result in zip(ORDERS, results, strict=True):
        settings = {**SETTINGS, "workflow": (order,), "mode": "sequential", "deterministic": True}
        alone = experiment.run(make_config({**settings, "run_dir": tmp_path / f"alone-{order}"}))
        for name, array in weights(alone.run_dir).items():
            np.testing.assert_array_equal(array, weights(result.run_dir)[name])
        assert result.summary["ledger"]["trained"] == 12
    first, second = (weights(result.run_dir) for result in results)
    assert any(not np.array_equal(first[name], second[name]) for name in first)


def test_the_second_finds_the_workers_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def noted(*arguments: Any) -> None:
        seen.append(workers())
        training.train(*arguments)

    monkeypatch.setattr(experiment, "train", noted)
    series.run_series(config(tmp_path, max_lag=1))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", ["batch", "freerun"])
def test_modes_that_hand_over_parts_start_anew_for_each(mode: str, tmp_path: Path) -> None:
    own = {"num_envs": 2, "num_workers": 1, "num_steps_per_env": 10} if mode == "batch" else {"segment_steps": 10}
    more = {"mode": mode, "episodes_per_update": None, "steps_per_update": 60, **own}
    results = series.run_series(config(tmp_path, **more))
    codes = [json.loads((result.run_dir / "config.json").read_text())["workflow"] for result in results]
    assert codes == [[order] for order in ORDERS]


def test_the_table_is_continued(tmp_path: Path) -> None:
    assert len(series.run_series(config(tmp_path, workflow=ORDERS[:1]))) == 1
    (result,) = series.run_series(config(tmp_path))
    assert result.run_dir.name.startswith("001-user")
    assert series.run_series(config(tmp_path)) == []
    table = json.loads((tmp_path / "workflows.json").read_text())["workflows"]
    assert list(table) == list(ORDERS)
    for entry in table.values():
        assert 0 <= entry["compliance"] <= 1
        assert entry["trial_return"] <= 0
    with pytest.raises(UserError, match="other settings"):
        series.run_series(config(tmp_path, learning_rate=0.5))


def test_the_trial_returns_leave_out_the_shaping(tmp_path: Path) -> None:
    returns = []
    for weight in (0.0, 1000.0):
        cfg = config(tmp_path / str(weight), workflow=ORDERS[:1], compliance_weight=weight, total_episodes=6)
        series.run_series(cfg)
        table = json.loads((tmp_path / str(weight) / "workflows.json").read_text())["workflows"]
        returns.append(table[ORDERS[0]]["trial_return"])
        assert -500 < returns[-1] <= 0


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "orders.txt"
    file.write_text("# two orders\n" + "\n".join(ORDERS) + "\n")
    words = ["train", "freerun/NetworkDefence-v0", "--workflows", str(file), "--run-dir", str(tmp_path / "runs")]
    words += ["--episode-steps", "10", "--total-episodes", "4", "--episodes-per-update", "2", "--mode", "pipes"]
    assert main([*words, "--num-workers", "2"]) == 0
    shown = capsys.readouterr()
    assert "op_server › enterprise" in shown.err
    assert main([*words, "--num-workers", "2"]) == 0
    assert "trained before" in capsys.readouterr().out


def test_bad_workflows_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for more, message in (
        ({"workflow": ("a,b", "c")}, "each of defender"),
        ({"workflow": (), "workflows": empty}, "names no workflow"),
        ({"workflow": (), "workflows": tmp_path / "missing"}, "cannot read"),
    ):
        with pytest.raises(UserError, match=message):
            series.run_series(config(tmp_path / "runs", **more))
    with pytest.raises(UserError, match="not both"):
        config(tmp_path, workflows=empty)


def test_a_series_goes_on_in_the_middle_of_a_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"deterministic": True, "total_episodes": 18}
    series.run_series(config(tmp_path / "whole", **more))
    calls: list[int] = []

    class Interrupts:
        def write(self, step: int, metrics: Any) -> None:
            if len(calls) == 2 and metrics["update"] == 2:
                raise KeyboardInterrupt

        def close(self) -> None: ...

    def interrupted(algorithm: Any, collector: Any, budget: Any, ledger: Any, sinks: Any, *rest: Any) -> None:
        calls.append(1)
        training.train(algorithm, collector, budget, ledger, [*sinks, Interrupts()], *rest)

    monkeypatch.setattr(experiment, "train", interrupted)
    results = series.run_series(config(tmp_path / "stopped", **more))
    assert [result.summary["outcome"] for result in results] == ["finished", "interrupted"]
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path / "stopped"), "-q"]) == 0
    folders = sorted(path.name for path in (tmp_path / "stopped").iterdir() if path.is_dir())
    assert folders == sorted(path.name for path in (tmp_path / "whole").iterdir() if path.is_dir())
    for name in folders:
        for key, array in weights(tmp_path / "whole" / name).items():
            np.testing.assert_array_equal(array, weights(tmp_path / "stopped" / name)[key])
    assert main(["train", "--resume", str(tmp_path / "stopped"), "-q"]) == 0  # all trained: nothing left to do
