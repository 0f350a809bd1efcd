"""What only `continuous` does: collectors that never wait, in threads or in processes, and a queue that drops."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import gymnasium
import pytest

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.modes import continuous
from freerun.collecting.modes.continuous import Continuous, ContinuousConfig
from freerun.collecting.modes.thread_trial import speed_up_by_threads, steps_per_second
from freerun.collecting.scheduling import dropping_queue
from freerun.core import CollectorSettings, Demand, Segment, UserError
from freerun.settings import registry
from freerun.telemetry.ledger import Ledger

Kind = Literal["thread", "process"]
KINDS: list[Kind] = ["thread", "process"]
PPO: dict[str, Any] = {"steps_per_update": 128, "num_epochs": 1, "minibatch_size": 128, "quiet": True}


@pytest.fixture
def quick_refreshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that wait until a full queue has dropped hundreds of segments would wait 50 ms for each."""
    monkeypatch.setattr(dropping_queue, "REFRESH_SECONDS", 0.002)


def make_policy(factory: GymnasiumFactory) -> MLPActor:
    return MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)


@contextmanager
def collecting(config: ContinuousConfig, env: str = "toy_envs:Audit", **env_args: Any) -> Iterator[Continuous]:
    factory = GymnasiumFactory(env, env_args)
    policy = make_policy(factory)
    collector = Continuous(factory, policy, CollectorSettings(config.num_workers, None, seed=3), config)
    try:
        collector.publish(policy.weights, 0)
        yield collector
    finally:
        collector.close()


def wait_for_drops(collector: Continuous, num_steps: int) -> None:
    """Until so many steps have been dropped: the queue is full then, and has been for a while."""
    deadline = time.monotonic() + 20
    while collector.counts().steps_dropped < num_steps:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_steps_are_shared_out_evenly() -> None:
    config = ContinuousConfig(num_collectors=4, num_envs=64, collection_batch_size=250)
    assert (config.envs_per_collector, config.num_steps_per_env, config.unit_steps) == (16, 16, 256)
    assert ContinuousConfig(num_collectors=2, num_envs=64, collection_batch_size=1).unit_steps == 32


@pytest.mark.usefixtures("quick_refreshes")
@pytest.mark.parametrize("kind", KINDS)
def test_collectors_go_on_while_nobody_takes_anything_and_the_oldest_steps_are_dropped(kind: Kind) -> None:
    config = ContinuousConfig(2, 6, max_queue_size=5, collection_batch_size=24, collector_kind=kind)
    with collecting(config, short=5, long=40) as collector:
        wait_for_drops(collector, 24 * 50)
        counts = collector.counts()
        assert counts.queue_fill == 1.0
        assert counts.steps_delivered == 0
        assert sum(counts.steps_dropped_by_worker.values()) == counts.steps_dropped
        assert counts.steps_dropped_by_length.keys() >= {5, 40}
        assert [segment.reward.shape for segment in collector.collect(Demand(steps=25))] == [(8, 3), (8, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_reach_collectors_before_their_next_batch(kind: Kind) -> None:
    config = ContinuousConfig(2, 2, max_queue_size=2, collection_batch_size=4, collector_kind=kind)
    weights = make_policy(GymnasiumFactory("toy_envs:Audit")).weights
    with collecting(config, step_seconds=0.001) as collector:
        for version in range(1, 4):
            collector.publish(weights, version)
            deadline = time.monotonic() + 20
            seen: set[int] = set()
            while seen != {version}:
                assert time.monotonic() < deadline
                seen = {int(segment.version.min()) for segment in collector.collect(Demand(steps=8))}


@pytest.mark.usefixtures("quick_refreshes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_is_too_slow_gets_true_returns_and_books_that_balance(kind: Kind) -> None:
    config = ContinuousConfig(2, 6, max_queue_size=4, collection_batch_size=24, collector_kind=kind)
    ledger = Ledger()
    with collecting(config, short=5, long=40) as collector:
        for _ in range(30):
            wait_for_drops(collector, collector.counts().steps_dropped + 100)
            ledger.account(collector.collect(Demand(steps=48)))
            ledger.finish_update()
            ledger.check_balance(collector.counts())
    assert collector.counts().steps_dropped > 0
    assert ledger.num_broken > 0
    assert ledger.episodes > 0
    assert {total for total, _ in ledger.recent_episodes} <= {5 * 6 / 2, 40 * 41 / 2}


@pytest.mark.usefixtures("quick_refreshes")
def test_what_an_algorithm_finds_important_is_kept() -> None:
    def lowest_mark(segment: Segment) -> float:
        return -float(segment.obs[..., 0].min())

    config = ContinuousConfig(1, 1, max_queue_size=3, collection_batch_size=5, collector_kind="process")
    with collecting(config, short=5, long=5) as collector:
        collector.prefer(lowest_mark)
        wait_for_drops(collector, 5 * 300)
        kept = [lowest_mark(segment) for segment in collector.collect(Demand(steps=15))]
    assert min(kept) > -0.05 / 100, "marks lie between 0 and 0.01; of 300 the three lowest were kept"


@pytest.mark.parametrize(("speed_up", "kind"), [(1.9, "thread"), (1.5, "process"), (None, "process")])
def test_threads_are_chosen_where_the_environment_leaves_pythons_lock_to_others(
    speed_up: float | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement itself depends on what else the machine does: here only what is made of it."""
    monkeypatch.setattr(continuous, "speed_up_by_threads", lambda factory: speed_up)
    with collecting(ContinuousConfig(2, 2)) as collector:
        assert collector.kind == kind
        assert collector.collect(Demand(steps=10))


def test_what_threads_gain_is_measured_by_stepping_the_environment() -> None:
    factory = GymnasiumFactory("toy_envs:Audit", {"step_seconds": 0.002})
    speed_up = speed_up_by_threads(factory)
    assert speed_up is not None
    assert speed_up > 0


@pytest.mark.parametrize("how", ["raise", "die"])
def test_an_environment_that_fails_when_it_is_tried_out_gets_processes(how: str) -> None:
    with collecting(ContinuousConfig(1, 1, collection_batch_size=4), "toy_envs:Faulty", how=how) as collector:
        assert collector.kind == "process"
        assert collector.collect(Demand(steps=40))


@pytest.mark.parametrize("kind", KINDS)
def test_ppo_trains_and_metrics_tell_of_the_queue(kind: Kind, run_dir: Path) -> None:
    result = freerun.train(
        "toy_envs:OneBit", mode="v1", num_collectors=2, num_envs=8, collection_batch_size=64, max_queue_size=20,
        collector_kind=kind, total_steps=6_000, learning_rate=0.01, run_dir=run_dir, **PPO
    )  # fmt: skip
    assert result.summary["mode"] == "continuous"
    assert json.loads((run_dir / "config.json").read_text())["mode"] == "continuous"
    assert result.summary["mean_return"] > 7
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["queue_percent"] <= 100 for line in metrics)
    ledger = result.summary["ledger"]
    names = ("trained", "handed_over_untrained", "cut", "broken", "dropped", "in_flight")
    assert ledger["started"] == sum(ledger[name] for name in names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 6}, "--num-envs 6 cannot be shared out evenly among 4 collectors"),
        ({"num_envs": 2}, "make it a multiple of --num-collectors"),
        ({"num_collectors": 0}, "--num-collectors must be at least 1, not 0"),
        ({"num_workers": 3}, r"has --num-collectors \(4\), not --num-workers"),
        ({"max_lag": 1}, "choose --mode batch or freerun, which honour it"),
        (
            {"queue_priority": "td-error"},
            "a critic that learns off-policy: --algo sac or fastsac or dqn or mbpo",
        ),
        (
            {"num_steps_per_env": 8},
            "belongs to --mode sync or batch; --mode continuous has --num-collectors, --num-envs, ",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=message):
        freerun.train("CartPole-v1", mode="continuous", run_dir=run_dir, **settings)
    assert not run_dir.exists()


def test_a_run_can_be_configured_again_from_what_it_recorded(run_dir: Path) -> None:
    settings = {"num_collectors": 1, "num_envs": 1, "total_steps": 300, "collector_kind": "process"}
    freerun.train("toy_envs:OneBit", mode="continuous", run_dir=run_dir, **settings, **PPO)
    recorded = json.loads((run_dir / "config.json").read_text())
    assert recorded["max_lag"] is None
    assert recorded["num_workers"] == 1
    again = registry.flatten_config(registry.make_config(recorded))
    assert json.loads(json.dumps(again)) == recorded


def test_a_thread_that_waits_for_the_lock_has_begun_all_the_same() -> None:
    """Or two that run one after the other would look twice as fast as one."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    late = time.perf_counter() - 10.0
    assert steps_per_second(env, 0, late) <= 1 / 10.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_of_one_serves_a_demand_of_many_batches(kind: Kind) -> None:
    """What the learner takes makes room, and somebody must be told."""
    config = ContinuousConfig(2, 2, max_queue_size=1, collection_batch_size=8, collector_kind=kind)
    with collecting(config) as collector:
        for _ in range(10):
            assert sum(segment.num_steps for segment in collector.collect(Demand(steps=320))) >= 320
