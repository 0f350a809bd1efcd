"""Flower's own strategies and mods on what sites send, honest or not. `make test-federated` runs it."""

from __future__ import annotations

import dataclasses
import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

if importlib.util.find_spec("flwr") is None:
    pytest.skip("Flower is not installed: make test-federated", allow_module_level=True)

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from freerun.core import LearnerFailure, UserError
from freerun.tools.federation import flower_records as records
from freerun.tools.federation.federation_options import FederationOptions, Strategy
from freerun.tools.federation.moment_merging import make_moments
from freerun.tools.federation.server_app import options_of
from freerun.tools.federation.shared_state import SharedState
from freerun.tools.federation.site_strategy import SiteStrategy, make_strategy


@pytest.fixture(autouse=True)
def in_a_task() -> None:
    """Flower makes messages only in a task of a run."""
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


def state(weights: Any, count: float = 0.0, mean: float = 0.0, variance: float = 1.0) -> SharedState:
    return SharedState({"net/w": np.array(weights, np.float32)}, {"obs": make_moments(count, [mean], [variance])})


class Nodes:
    """All that a strategy asks of a Grid: which nodes there are."""

    def __init__(self, num_nodes: int):
        self._num_nodes = num_nodes

    def get_node_ids(self) -> list[int]:
        return list(range(1, self._num_nodes + 1))


class Server:
    """A strategy, and the rounds that it has reported."""

    def __init__(self, num_sites: int, start: SharedState, **options: Any):
        self.rounds: list[dict[str, Any]] = []
        chosen = FederationOptions(**options, updates_per_round=5)
        inner = make_strategy(chosen, num_sites)
        self.strategy = SiteStrategy(inner, start, chosen, lambda figures, shared: self.rounds.append(figures))
        self._nodes = Nodes(num_sites)

    def round(
        self,
        answers: dict[str, SharedState],
        steps: dict[str, Any] | None = None,
        extra: Callable[[str, RecordDict], None] = lambda name, content: None,
    ) -> SharedState:
        """Send the weights out, take these answers in, and return what was made of them."""
        number = len(self.rounds) + 1
        arrays = records.to_arrays(self.strategy.shared.weights)
        messages = list(self.strategy.configure_train(number, arrays, ConfigRecord(), self._nodes))
        assert messages[0].content[records.CONFIG][records.UPDATES] == 5
        replies = []
        for message, (name, shared) in zip(messages, answers.items(), strict=True):
            num_steps = (steps or {}).get(name, 100)
            site = ConfigRecord({records.NAME: name, records.MOMENTS: shared.packed_moments()})
            metrics = MetricRecord({records.STEPS: num_steps, records.RETURN: 1.0})
            arrays = records.to_arrays(shared.weights)
            content = RecordDict({records.ARRAYS: arrays, records.METRICS: metrics, records.SITE: site})
            extra(name, content)
            replies.append(Message(content, reply_to=message))
        self.strategy.aggregate_train(number, replies)
        return self.strategy.shared

    def weights(self, *args: Any) -> list[float]:
        found: list[float] = self.round(*args).weights["net/w"].tolist()
        return found


def test_weights_are_averaged_by_steps_and_moments_by_count() -> None:
    server = Server(2, state([0.0, 0.0]))
    # 1 · 3/4 + 5 · 1/4 = 2; the moments are those of test_moment_merging.py.
    answers = {"a": state([1.0, 2.0], 2, 2.0, 1.0), "b": state([5.0, 2.0], 3, 6.0, 2.0)}
    merged = server.round(answers, {"a": 300, "b": 100})
    assert merged.weights["net/w"].tolist() == [2.0, 2.0]
    assert merged.weights["net/w"].dtype == np.float32
    np.testing.assert_allclose([merged.moments["obs"].mean[0], merged.moments["obs"].variance[0]], [4.4, 5.44])
    figures = server.rounds[0]
    assert figures["sites"] == {
        "a": {"steps": 300, "mean_return": 1.0},
        "b": {"steps": 100, "mean_return": 1.0},
    }
    assert figures["bytes_up"] > 0
    assert figures["bytes_down"] > 0


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedmedian"])
def test_what_a_single_site_sends_comes_back_bit_for_bit(strategy: str) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    merged = Server(1, state(np.zeros(1000)), strategy=strategy).round({"a": state(values, 7, 0.1, 0.3)}, {"a": 12345})
    np.testing.assert_array_equal(merged.weights["net/w"], values)
    assert merged.moments["obs"].state_dict() == {"count": 7.0, "mean": np.array([0.1]), "variance": np.array([0.3])}


def test_the_order_of_the_answers_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    answers = {name: state(rng.standard_normal(1000), 3, 0.1, 0.2) for name in "abc"}
    first = Server(3, state(np.zeros(1000))).round(answers)
    second = Server(3, state(np.zeros(1000))).round(dict(reversed(answers.items())))
    np.testing.assert_array_equal(first.weights["net/w"], second.weights["net/w"])


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_garbage_costs_a_site_its_round(strategy: str) -> None:
    garbage = {
        "not finite": state([np.nan, 1.0]),
        "other shape": state([1.0, 1.0, 1.0]),
        "other names": SharedState({"v": np.ones(2, np.float32)}, state([0.0]).moments),
        "no moments": SharedState(state([1.0, 1.0]).weights, {}),
        "bad moments": state([1.0, 1.0], np.inf),
        "no steps": state([1.0, 1.0]),
    }
    names = ["honest", *garbage]
    server, alone = (Server(number, state([0.0, 0.0]), strategy=strategy) for number in (len(names), 1))
    honest = state([1.0, 3.0], 4, 1.0, 2.0)
    merged = server.round({"honest": honest, **garbage}, {"no steps": float("nan")})
    np.testing.assert_array_equal(merged.weights["net/w"], alone.round({"honest": honest}).weights["net/w"])
    assert server.rounds[0]["sites"].keys() == {"honest"}
    assert server.rounds[0]["refused"] == {
        "not finite": "its weights net/w are not finite",
        "other shape": "its weights net/w have the shape (3,), not (2,)",
        "other names": "its weights are those of another network: net/w is on one side only",
        "no moments": "its moments are those of another network: obs is on one side only",
        "bad moments": "its moments obs are no moments",
        "no steps": "it has trained nan steps",
    }
    # The next round is open to all of them.
    everyone = server.round(dict.fromkeys(names, honest))
    assert server.rounds[1]["sites"].keys() == set(names)
    assert np.isfinite(everyone.weights["net/w"]).all()


def test_the_median_holds_against_poison_and_the_mean_does_not() -> None:
    answers = {"a": state([1.0], 10, 1.0, 1.0), "b": state([1.2], 10, 1.0, 1.0), "c": state([0.9], 10, 1.0, 1.0)}
    poisoned = {**answers, "bad": state([-1e6], 1e30, 1e6, 1e6)}
    robust = Server(4, state([0.0]), strategy="fedmedian").round(poisoned, {"bad": 10**9})
    assert 0.9 <= robust.weights["net/w"][0] <= 1.2
    assert robust.moments["obs"].mean[0] == 1.0
    assert robust.moments["obs"].count == 40
    assert Server(4, state([0.0])).weights(poisoned)[0] < -1e5


def more_records(name: str, content: RecordDict) -> None:
    if name == "rogue":
        content["more"] = MetricRecord({"a": 1.0})
        content["weights"] = records.to_arrays({"a": np.ones(2, np.float32)})


def more_metrics(name: str, content: RecordDict) -> None:
    if name == "rogue":
        content[records.METRICS]["a"] = 1.0


def a_list_for_a_number(name: str, content: RecordDict) -> None:
    if name == "rogue":
        content[records.METRICS][records.RETURN] = [1.0, 2.0]


@pytest.mark.parametrize("extra", [more_records, more_metrics, a_list_for_a_number])
@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_no_odd_message_ends_the_federation(strategy: str, extra: Callable[[str, RecordDict], None]) -> None:
    """Flower refuses to put a round together if the messages of sites have different records."""
    server = Server(3, state([0.0]), strategy=strategy)
    merged = server.round({"a": state([1.0]), "b": state([1.0]), "rogue": state([1.0])}, extra=extra)
    assert merged.weights["net/w"][0] > 0
    assert {"a", "b"} <= server.rounds[0]["sites"].keys()


def test_weights_travel_as_float16_and_are_added_up_as_float32() -> None:
    exact, half = (Server(2, state(np.full(1000, 0.1)), send_as=send_as) for send_as in ("exact", "float16"))
    answers = {"a": state(np.full(1000, 0.1)), "b": state(np.full(1000, 0.2))}
    for server in (exact, half):
        sent = list(
            server.strategy.configure_train(
                1, records.to_arrays(server.strategy.shared.weights), ConfigRecord(), Nodes(2)
            )
        )
        received = records.read_shared(sent[0].content, records.CONFIG).weights["net/w"]
        assert received.dtype == np.float32
        np.testing.assert_allclose(received, 0.1, rtol=5e-4 if server is half else 1e-7)
        merged = server.round(answers).weights["net/w"]
        assert merged.dtype == np.float32
        np.testing.assert_allclose(merged, 0.15, rtol=1e-6)  # what is put together is not rounded
    assert half.rounds[0]["bytes_down"] < 0.7 * exact.rounds[0]["bytes_down"]
    too_large = records.to_weights(records.to_arrays({"w": np.array([1e6], np.float32)}, "float16"))
    assert np.isinf(too_large["w"]).all()


def test_fedavgm_goes_beyond_the_mean() -> None:
    server = Server(2, state([1.0]), strategy="fedavgm", server_step=1.5)
    np.testing.assert_allclose(server.weights({"a": state([2.0]), "b": state([4.0])}), [1.0 + 1.5 * 2.0])


def test_two_sites_of_one_name_are_two() -> None:
    server = Server(2, state([0.0]))
    arrays = records.to_arrays(server.strategy.shared.weights)
    replies: list[Message] = []
    for message in server.strategy.configure_train(1, arrays, ConfigRecord(), Nodes(2)):
        shared = state([float(len(replies) + 1)])
        content = {
            records.ARRAYS: records.to_arrays(shared.weights),
            records.METRICS: MetricRecord({records.STEPS: 1, records.RETURN: 0.0}),
            records.SITE: ConfigRecord({records.NAME: "twin", records.MOMENTS: shared.packed_moments()}),
        }
        replies.append(Message(RecordDict(content), reply_to=message))
    server.strategy.aggregate_train(1, replies)
    # Otherwise a rogue could cost any site its rounds, by taking its name.
    assert server.strategy.shared.weights["net/w"].tolist() == [1.5]
    assert [name.partition(" (node ")[0] for name in server.rounds[0]["sites"]] == ["twin", "twin"]


def test_fedadam_takes_a_step_of_its_own() -> None:
    server = Server(1, state([0.0]), strategy="fedadam", server_learning_rate=0.01)
    merged = server.round({"a": state([1.0])})
    # Adam's step is about its learning rate, whatever the size of the change.
    assert 0.0 < merged.weights["net/w"][0] < 0.1
    assert merged.weights["net/w"].dtype == np.float32


def test_a_round_without_any_site_ends_the_federation() -> None:
    server = Server(1, state([0.0]))
    with pytest.raises(LearnerFailure, match=r"no site is left in round 1 \(a: its weights net/w are not finite\)"):
        server.round({"a": state([np.nan])})


def test_central_privacy_adds_noise_to_the_mean() -> None:
    options: dict[str, Any] = {"privacy": "central", "clipping_norm": 1.0, "noise_multiplier": 0.5}
    server = Server(2, state(np.zeros(10_000)), **options)
    merged = server.round({"a": state(np.zeros(10_000)), "b": state(np.zeros(10_000))})
    # The standard deviation of the mean's noise is multiplier · norm / sites.
    assert merged.weights["net/w"].std() == pytest.approx(0.5 * 1.0 / 2, rel=0.05)


def test_a_run_config_has_the_names_of_the_flags() -> None:
    config = {"strategy": "fedmedian", "updates-per-round": 7, "folder": "x"}
    assert options_of(config) == FederationOptions(strategy="fedmedian", updates_per_round=7)
    with pytest.raises(UserError, match="unknown entry 'round'"):
        options_of({"round": 3})
    # Flower refuses entries that the app's own config does not have, so that has all of them.
    app = Path(__file__).parents[2] / "examples" / "flower_app" / "pyproject.toml"
    entries = tomllib.loads(app.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    names = {field.name.replace("_", "-") for field in dataclasses.fields(FederationOptions)}
    assert entries.keys() == {*names, "folder"}
    assert options_of(entries) == FederationOptions(min_sites=2)
    # Flower takes any text. A misspelt word must not turn privacy off.
    with pytest.raises(UserError, match="there is no --privacy centrall: use none, central, local"):
        options_of({"privacy": "centrall"})
    with pytest.raises(UserError, match="there is no --strategy krum"):
        options_of({"strategy": "krum"})
