"""A site pauses after every round, takes other weights, and is otherwise an ordinary training."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.core import UserError
from freerun.settings.registry import make_config
from freerun.tools.federation import site_link
from freerun.tools.federation.shared_state import SharedState
from freerun.tools.federation.site_link import SiteFailure, SiteLink, SiteMessage
from freerun.tools.federation.site_training import run_site

PPO: dict[str, Any] = {"total_steps": 1200, "steps_per_update": 200, "hidden_sizes": (8,), "normalize_reward": True}
SAC: dict[str, Any] = {"total_steps": 600, "steps_per_update": 100, "learning_starts": 100, "hidden_sizes": (8,)}
CASES = {
    "ppo": ("CartPole-v1", {"algo": "ppo", **PPO}),
    "ppo by autograd": ("CartPole-v1", {"algo": "ppo", "learner": "torch", **PPO}),
    "sac": ("Pendulum-v1", {"algo": "sac", **SAC, "updates_per_step": 0.2}),
    "dqn": ("CartPole-v1", {"algo": "dqn", **SAC, "updates_per_step": 0.2}),
}


WEIGHTS = "net/actor.0.weight"


class Answers(list[SiteMessage]):
    """What a site has answered, round by round, and what went wrong."""

    failure: BaseException | None = None


@contextlib.contextmanager
def driven(socket: Path, drive: Callable[[SiteLink, Answers], None]) -> Iterator[Answers]:
    """Give orders to a site from another thread: a site trains in the main one, as every run does."""
    answers = Answers()

    def call() -> None:
        try:
            drive(SiteLink(socket, reach_seconds=30, answer_seconds=60), answers)
        except BaseException as failure:
            answers.failure = failure
            link = SiteLink(socket, reach_seconds=0, answer_seconds=10)
            with contextlib.suppress(SiteFailure):  # it may be gone; if it is not, it would wait for ever
                link.finish(link.describe().shared)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield answers
    finally:
        thread.join()
    if answers.failure is not None:
        raise answers.failure


def in_rounds(*sizes: int) -> Callable[[SiteLink, Answers], None]:
    """A federation of one site, in rounds of so many updates: what it sends is what it gets back."""

    def drive(link: SiteLink, answers: Answers) -> None:
        shared = link.describe().shared
        for num_updates in sizes:
            answers.append(link.train(shared, num_updates))
            shared = answers[-1].shared
        link.finish(shared)

    return drive


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("ppo", "sequential"),
        ("ppo", "freerun"),
        ("ppo by autograd", "sequential"),
        ("sac", "pipes"),
        ("dqn", "executor"),
    ],
)
def test_a_single_site_trains_as_freerun_train_does(tmp_path: Path, case: str, mode: str) -> None:
    env, settings = CASES[case]
    settings = {**settings, "mode": mode, "deterministic": True, "quiet": True, "num_workers": 1}
    plain = freerun.train(env, run_dir=tmp_path / "plain", **settings)
    num_updates = plain.summary["updates"]
    sizes = [2] * (num_updates // 2) + [1] * (num_updates % 2)
    assert len(sizes) > 1
    with driven(tmp_path / "s", in_rounds(*sizes)) as answers:
        site = run_site(make_config({"env": env, **settings, "run_dir": tmp_path / "site"}), tmp_path / "s", "alone")

    assert site.summary["updates"] == num_updates
    np.testing.assert_array_equal(site.policy.weights, plain.policy.weights)
    assert [answer.header["updates"] for answer in answers] == sizes
    assert sum(answer.header["steps"] for answer in answers) == plain.summary["env_steps"]
    assert not (tmp_path / "s").exists()


def small_ppo(tmp_path: Path, **settings: Any) -> Any:
    common = {"env": "CartPole-v1", "algo": "ppo", "mode": "sequential", "num_workers": 1, "quiet": True}
    return make_config({**common, **PPO, "run_dir": tmp_path / "site", **settings})


def test_a_round_begins_with_the_weights_of_the_order_and_keeps_the_optimiser(tmp_path: Path) -> None:
    def drive(link: SiteLink, answers: Answers) -> None:
        answers.append(link.describe())
        answers.append(link.train(answers[0].shared, 1))
        answers.append(link.train(answers[0].shared, 1))
        answers.append(link.describe())
        link.finish(answers[0].shared)

    with driven(tmp_path / "s", drive) as answers:
        site = run_site(small_ppo(tmp_path), tmp_path / "s", "a")
    assert (site.summary["outcome"], site.summary["reason"]) == ("stopped", "the federation has ended")
    assert site.summary["updates"] == 2
    start, first, second, before_the_end = (answer.shared for answer in answers)
    # Both rounds began with moments of nothing, so each has the rows of one round.
    assert first.moments["obs_moments"].count == answers[1].header["steps"]
    assert second.moments["obs_moments"].count == answers[2].header["steps"]
    # Adam goes on: its second step from the same weights is another one than its first.
    assert not np.array_equal(second.weights[WEIGHTS], first.weights[WEIGHTS])
    np.testing.assert_array_equal(before_the_end.weights[WEIGHTS], second.weights[WEIGHTS])
    # The run ends with the weights of the last order, which are those that it started with.
    policy = freerun.load_policy(tmp_path / "site").actor.arrays
    np.testing.assert_array_equal(policy["0.weight"], start.weights[WEIGHTS])


def test_a_site_refuses_what_does_not_fit_and_goes_on(tmp_path: Path) -> None:
    refusals = []

    def drive(link: SiteLink, answers: Answers) -> None:
        good = link.describe().shared
        weights, moments = good.weights, good.moments
        not_finite = {**weights, WEIGHTS: np.full_like(weights[WEIGHTS], np.nan)}
        other_shape = {**weights, WEIGHTS: weights[WEIGHTS][:1]}
        bad = [SharedState(not_finite, moments), SharedState(other_shape, moments), SharedState(weights, {})]
        for shared, num_updates in [*((shared, 1) for shared in bad), (good, 0)]:
            with pytest.raises(SiteFailure) as caught:
                link.train(shared, num_updates)
            refusals.append(str(caught.value))
        answers.append(link.train(good, 1))
        link.finish(answers[-1].shared)

    with driven(tmp_path / "s", drive) as answers:
        run_site(small_ppo(tmp_path), tmp_path / "s", "a")
    assert answers[0].header["updates"] == 1
    assert refusals == [
        f"a refuses: its weights {WEIGHTS} are not finite",
        f"a refuses: its weights {WEIGHTS} have the shape (1, 4), not (8, 4)",
        "a refuses: its moments are those of another network: obs_moments is on one side only",
        "a refuses: a round has a whole number of updates, not 0",
    ]


def test_a_site_can_keep_its_critic(tmp_path: Path) -> None:
    refusals = []

    def drive(link: SiteLink, answers: Answers) -> None:
        policy_link = SiteLink(tmp_path / "s", share="policy")
        answers.append(link.describe())
        answers.append(policy_link.describe())
        answers.append(policy_link.train(answers[1].shared, 1))
        for wrong in (link.train, SiteLink(tmp_path / "s", share="critic").train):  # type: ignore[arg-type]
            with pytest.raises(SiteFailure) as caught:
                wrong(answers[2].shared, 1)
            refusals.append(str(caught.value))
        policy_link.finish(answers[1].shared)

    with driven(tmp_path / "s", drive) as answers:
        run_site(small_ppo(tmp_path), tmp_path / "s", "a")
    everything, policy, trained = (answer.shared for answer in answers)
    assert {path.split(".")[0] for path in everything.weights.keys() - policy.weights.keys()} == {"net/critic"}
    assert trained.weights.keys() == policy.weights.keys()
    assert "net/critic.0.bias is on one side only" in refusals[0]
    assert "--algo ppo cannot share 'critic' alone" in refusals[1]


def test_the_proximal_term_keeps_a_site_near_the_others(tmp_path: Path) -> None:
    def drive(link: SiteLink, answers: Answers) -> None:
        answers.append(link.describe())
        answers.append(link.train(answers[0].shared, 1, proximal=0.0))
        answers.append(link.train(answers[0].shared, 1, proximal=100.0))
        link.finish(answers[0].shared)

    held_by = {}
    for learner in ("fast", "torch"):
        with driven(tmp_path / "s", drive) as answers:
            run_site(small_ppo(tmp_path, learner=learner, run_dir=tmp_path / learner), tmp_path / "s", "a")
        start, free, held = (answer.shared.weights[WEIGHTS] for answer in answers)
        assert np.abs(held - start).mean() < np.abs(free - start).mean()
        held_by[learner] = held
    np.testing.assert_allclose(held_by["fast"], held_by["torch"], atol=1e-4)


def test_the_end_of_the_budget_ends_a_round(tmp_path: Path) -> None:
    def drive(link: SiteLink, answers: Answers) -> None:
        answers.append(link.train(link.describe().shared, 1000))

    with driven(tmp_path / "s", drive) as answers:
        site = run_site(small_ppo(tmp_path), tmp_path / "s", "a")
    assert site.summary["outcome"] == "finished"
    assert answers[0].header["updates"] == site.summary["updates"]
    with pytest.raises(SiteFailure, match="there is no site"):
        SiteLink(tmp_path / "s", reach_seconds=0).describe()


def test_no_file_and_no_other_site_is_replaced_by_a_socket(tmp_path: Path) -> None:
    notes, taken, left = tmp_path / "notes", tmp_path / "taken", tmp_path / "left"
    notes.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="a file of this name that is no socket"):
        run_site(small_ppo(tmp_path), notes, "a")
    assert notes.read_text(encoding="utf-8") == "mine"
    with site_link.listen(taken), pytest.raises(UserError, match="another site listens there"):
        run_site(small_ppo(tmp_path), taken, "a")
    # A site that was killed leaves its socket behind.
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    assert left.is_socket()
    site_link.listen(left).close()


def test_a_socket_needs_a_short_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too long for the name of a socket"):
        run_site(small_ppo(tmp_path), tmp_path / ("s" * 120), "a")
