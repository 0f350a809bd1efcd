"""Real runs whose tunables change while they go on: every step is audited, and the ledger balances throughout."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import audited_ppo
import pytest

import freerun
from freerun.core import Tunable, UserError
from freerun.persistence import checkpoint
from freerun.run.update_hooks import Update
from freerun.settings import registry
from freerun.tools.probe import auto_mode
from freerun.tuning import live_tuner, tuner
from freerun.tuning.observation import Observation
from freerun.tuning.rules import Aim, Circumstances, Suggestion
from freerun.tuning.tuner import Change, Effect

RESTLESS: dict[str, dict[str, Any]] = {
    "freerun": {"num_workers": 2, "adapt_max_envs_per_worker": 3},
    "freerun-segments": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 8},
    "pipes": {"num_workers": 2},
    "executor": {"num_workers": 2},
    "continuous-process": {"num_collectors": 2, "num_envs": 4, "collector_kind": "process"},
    "continuous-thread": {"num_collectors": 2, "num_envs": 4, "collector_kind": "thread"},
    "batch": {"num_envs": 3, "num_steps_per_env": 8, "max_queue_size": 2},
}
TUNABLES = {
    "freerun": {"num_workers", "envs_per_worker"},
    "freerun-segments": {"num_workers", "collection_batch"},
    "pipes": {"num_workers"},
    "executor": {"num_workers"},
    "continuous-process": {"num_workers", "queue_size", "collection_batch"},
    "continuous-thread": {"num_workers", "queue_size", "collection_batch"},
    "batch": {"queue_size", "collection_batch"},
}
LEARNING = {"minibatch", "update_ratio"}


class Restless:
    """In the tuner's place: changes one tunable after another, to its bounds and halfway, whatever it sees."""

    def __init__(self, tunables: Sequence[Tunable], circumstances: Circumstances):
        self._tunables = tunables
        self._values = {tunable.name: tunable.read() for tunable in tunables}
        self._plan = self._make_plan()
        self.trial = None

    def _make_plan(self) -> Iterator[tuple[str, float]]:
        for place in itertools.cycle(("high", "low", "between")):
            for tunable in self._tunables:
                middle = tunable.fit((tunable.low + tunable.high) / 2)
                yield tunable.name, {"high": tunable.high, "low": tunable.low, "between": middle}[place]

    def observe(self, seen: Observation) -> list[Change]:
        name, value = next(self._plan)
        old, self._values[name] = self._values[name], value
        effect = Effect(seen.steps_per_second, seen.steps_per_second, 0.0, seen.noise)
        return [Change("try", name, old, value, "it is restless", effect)]


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tuner, "Tuner", Restless)
    monkeypatch.setattr(live_tuner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(live_tuner, "SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(live_tuner, "UNITS_TO_SETTLE", 0.1)
    monkeypatch.setitem(registry.ALGORITHMS, "audited-ppo", audited_ppo.ENTRY)


def changes(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "adapting.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(name: str, run_dir: Path, total_steps: int, **more: Any) -> freerun.Result:
    options: dict[str, Any] = {
        "steps_per_update": 200,
        "minibatch_size": 100,
        "num_epochs": 2,
        "quiet": True,
        "adapt": True,
    }
    if name != "batch":
        options["adapt_max_workers"] = 5
    if not name.startswith("continuous"):
        options["max_lag"] = 2
    mode = name.partition("-")[0]
    options |= {"adapt_window": 0.05, "algo": "audited-ppo", "env_args": {"step_seconds": 0.001}}
    return freerun.train(
        "sealed_env:Sealed", mode=mode, total_steps=total_steps, run_dir=run_dir, **options | RESTLESS[name] | more
    )


@pytest.mark.slow
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("name", RESTLESS)
def test_no_step_is_lost_or_seen_twice_while_everything_moves(name: str, run_dir: Path) -> None:
    steps = {"executor": 2500, "batch": 3000}.get(name, 8000)  # one process makes the steps of `batch`
    result = train(name, run_dir, steps, adapt_max_minibatch=200, adapt_min_update_ratio=1.0)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert set(result.summary["adapted"]) == TUNABLES[name] | LEARNING
    assert records[-1]["audited_steps"] == result.summary["env_steps"] >= steps
    ledger = result.summary["ledger"]
    kinds = ("trained", "handed_over_untrained", "cut", "broken", "dropped", "in_flight")
    assert ledger["started"] == sum(ledger[kind] for kind in kinds)
    assert {change["knob"] for change in changes(run_dir)} == TUNABLES[name] | LEARNING
    assert records[-1]["adapt_changes"] >= len(TUNABLES[name])
    assert {f"adapted_{tunable}" for tunable in TUNABLES[name]} <= set(records[-1])
    assert len({record["adapted_minibatch"] for record in records}) > 1
    if "num_workers" in TUNABLES[name]:
        assert max(record["adapted_num_workers"] for record in records) == 5
        assert min(record["adapted_num_workers"] for record in records) == 1
    assert result.summary["incidents"] == {}
    assert result.summary["worker_restarts"] == 0
    if name not in ("freerun-segments", "continuous-process", "continuous-thread", "batch"):
        assert ledger["cut"] == ledger["dropped"] == ledger["rerun"] == 0


class Still(Restless):
    def observe(self, seen: Observation) -> list[Change]:
        return []


@pytest.mark.usefixtures("restless")
def test_a_run_that_was_adapted_goes_on_with_what_it_had(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train("pipes", run_dir, 2000, adapt_min_update_ratio=1.0)
    adapted = checkpoint.newest(run_dir).state["adapted"]
    assert set(adapted) == {"num_workers", "update_ratio"}
    monkeypatch.setattr(live_tuner, "Tuner", Still)
    freerun.resume(run_dir, total_steps=4000, trust=["sealed_env:Sealed"])
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    resumed = [record for record in records if record["update"] > before.summary["updates"]]
    assert len(resumed) > 5
    for record in resumed:
        assert record["adapted_num_workers"] == adapted["num_workers"]
        assert record["adapted_update_ratio"] == adapted["update_ratio"]


def more_workers(seen: Observation, values: Mapping[str, float], circumstances: Circumstances) -> list[Suggestion]:
    """In the rules' place: twice as many workers, whatever was seen."""
    return [Suggestion("num_workers", 2, Aim.SPEED, "a test wants it")]


def stop_after_a_verdict(update: Update) -> None:
    """End the run once the tuner has judged its first change: how soon that is depends on the machine."""
    if any(change["kind"] != "try" for change in changes(update.run_dir)):
        update.stop("the tuner has judged a change")


@pytest.mark.slow
def test_workers_that_fail_after_a_change_undo_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "suggestions", more_workers)
    freerun.train(
        "crowded_env:Crowded",
        mode="pipes",
        num_workers=1,
        adapt=True,
        adapt_max_workers=2,
        adapt_window=0.5,
        env_args={"folder": str(tmp_path), "most": 1, "step_seconds": 0.002},
        steps_per_update=200,
        num_epochs=1,
        minibatch_size=200,
        total_steps=20_000,
        on_update=stop_after_a_verdict,
        quiet=True,
        run_dir=run_dir,
    )
    tried, undone, *_ = changes(run_dir)
    assert (tried["kind"], tried["knob"], tried["new"]) == ("try", "num_workers", 2)
    assert (undone["kind"], undone["new"]) == ("undo", 1)
    assert "since the change" in undone["reason"]


@pytest.mark.slow
def test_it_tunes_a_run_and_says_what_it_did(run_dir: Path) -> None:
    """Sixteen-fold speed is there for the taking. How much of it a run takes depends on the machine."""
    freerun.train(
        "freerun/Straggler-v0",
        mode="freerun",
        num_workers=1,
        adapt=True,
        adapt_max_workers=8,
        adapt_window=0.5,
        env_args={"mean_seconds": 0.001, "tail_seconds": 0.002},
        steps_per_update=400,
        num_epochs=1,
        minibatch_size=400,
        total_steps=60_000,
        on_update=stop_after_a_verdict,
        quiet=True,
        run_dir=run_dir,
    )
    first, *_ = changes(run_dir)
    assert (first["kind"], first["old"]) == ("try", 1)
    assert first["knob"] in ("num_workers", "envs_per_worker")  # the latter where others keep the cores busy
    assert first["new"] > 1
    assert "the learner waits" in first["reason"]
    verdicts = [change for change in changes(run_dir) if change["kind"] != "try"]
    assert verdicts
    assert all({"before", "after", "gain", "noise"} <= set(change) for change in verdicts)
    log = (run_dir / "log.txt").read_text()
    assert f"adapt: try {first['knob']} 1 → " in log


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"deterministic": True},
            "--adapt decides by the clock, which --deterministic must not: leave one of them out",
        ),
        ({"mode": "sync"}, "--adapt finds nothing to move in --mode sync: leave it out, or choose one of pipes"),
        ({"mode": "sequential"}, "--adapt finds nothing to move in --mode sequential"),
        ({"num_learners": 2}, "--adapt tunes a run with one learner: leave --num-learners out"),
        ({"num_workers": 8, "adapt_max_workers": 4}, "--adapt-max-workers 4 is less than the 8 that the run starts"),
        ({"mode": "batch", "adapt_max_workers": 4}, "--mode batch keeps its number of workers, whatever --adapt does"),
        ({"adapt": False, "adapt_max_workers": 4}, "--adapt-max-workers is a bound of --adapt: give that too"),
        ({"adapt_max_queue_size": 0}, "--adapt-max-queue-size must be at least 1, not 0"),
        (
            {"adapt_max_queue_size": 4},
            "--adapt-max-queue-size bounds nothing that --adapt could move here, in --mode freer",
        ),
        (
            {"mode": "batch", "adapt_max_queue_size": 4},
            "--adapt-max-queue-size 4 is less than the 10 that the run starts",
        ),
        (
            {"segment_steps": 8, "adapt_max_envs_per_worker": 4},
            "--adapt-max-envs-per-worker bounds nothing that --adapt could move here",
        ),
        ({"adapt_window": 0.0}, "--adapt-window must be above 0, not 0"),
        ({"adapt_max_minibatch": 32}, "--adapt-max-minibatch 32 is less than the 256 that the run starts with"),
        ({"adapt_min_update_ratio": 11.0}, "--adapt-min-update-ratio 11 is more than the 10 that the run starts with"),
        (
            {"env": "Pendulum-v1", "algo": "mbpo", "adapt_max_minibatch": 512},
            "--adapt cannot move MBPO's minibatches while it runs: leave --adapt-max-minibatch out",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_with_one_sentence(
    options: dict[str, Any], sentence: str, run_dir: Path
) -> None:
    settings = {"env": "CartPole-v1", "adapt": True, "num_workers": 2, "quiet": True, "run_dir": run_dir, **options}
    if options.get("mode") in ("sequential", "batch"):
        del settings["num_workers"]
    with pytest.raises(UserError, match=sentence):
        freerun.train(**settings)


@pytest.mark.parametrize(
    ("mode", "bounds", "sentence"),
    [
        ("sync", {}, "--adapt finds nothing to move in --mode sync"),
        ("batch", {"adapt_max_workers": 4}, "--mode batch keeps its number of workers, whatever --adapt does"),
    ],
)
def test_auto_leaves_modes_out_that_cannot_be_adapted(mode: str, bounds: dict[str, Any], sentence: str) -> None:
    config = registry.make_config({"env": "CartPole-v1", "mode": mode, "adapt": True, **bounds})
    with pytest.raises(UserError, match=sentence):
        auto_mode.check_mode(mode, config)
    auto_mode.check_mode(
        "pipes", registry.make_config({"env": "CartPole-v1", "mode": "pipes", "adapt": True, **bounds})
    )
