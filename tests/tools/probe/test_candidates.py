"""What `auto` chooses from, and what is predicted for it, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from freerun.core import HandedOver, ModeOptions, ModeTraits, Predictor, ProbeModel
from freerun.settings import defaults, registry
from freerun.settings.config import AnyConfig
from freerun.settings.registry import ModeEntry, make_config
from freerun.tools.cli.train_flags import Flags
from freerun.tools.probe import auto_mode, candidates
from freerun.tools.probe.auto_mode import Probe
from freerun.tools.probe.candidates import Candidate, MachineLimits, Search, with_settings
from freerun.tools.probe.forecast import Forecast, forecast, predict_candidate
from freerun.tools.probe.measurement import Environment, Measurement, Overhead, UpdateCost
from freerun.tools.probe.probe_report import command
from freerun.tools.probe.update_costs import MOST_TIMED_STEPS, learner_of, sizes_to_time, update_cost

ENV = "toy_envs:OneBit"
SLEEPS = Environment(0.0, (0.0,), (0.01,), 0.0, 0.0, (100,), 100, 10.0, {}, None)
"""Every step sleeps for 10 ms; an episode has 100 of them."""
COMPUTES = Environment(0.0, (0.0,), (0.001,), 1.0, 0.0, (100,), 100, 10.0, {"4": (0.0004, 0.0004)}, None)
"""A step computes for 1 ms alone, and for 0.4 ms where four environments are stepped together."""


def config_of(mode: str = "freerun", **settings: Any) -> AnyConfig:
    return make_config({"env": ENV, "mode": mode, **settings})


def measured(env: Environment, config: AnyConfig, learn_seconds: float = 0.0, cores: int = 2) -> Measurement:
    """A machine on which an update costs this much per step, and handing over costs nothing."""
    demand = {"steps": config.algorithm.steps_per_update or 2048, "episodes": 0, "whole_episodes": True}
    sizes = (config.algorithm.minibatch_size, config.algorithm.steps_per_update, learner_of(config))
    update = UpdateCost(demand, demand["steps"], learn_seconds * demand["steps"], *sizes)
    return Measurement(env, cores, float(cores), 0.0, 0.0, (update,), {}, {"1": 0.0, "2": 0.0}, 8000.0, 0.0)


def predicted(env: Environment, learn_seconds: float = 0.0, cores: int = 2, **settings: Any) -> Forecast:
    config = defaults.complete(config_of(steps_per_update=1000, **settings))
    config = with_settings(config, {"segment_steps": settings.get("segment_steps")})  # whole episodes if not given
    return predict_candidate(measured(env, config, learn_seconds, cores), Candidate("freerun", {}, config))


def limits(env: Environment, cores: int = 2, megabytes: float = 8000.0) -> MachineLimits:
    return MachineLimits(env, cores, megabytes, update_steps=2048)


# ---------------------------------------------------------------------------------------------- the model


def test_rounds_of_whole_episodes_keep_few_workers_busy_and_segments_all_of_them() -> None:
    # An update of 1,000 steps is 10 episodes of 1 s: 10 of 100 workers play, and the others have nothing to do.
    assert predicted(SLEEPS, num_workers=100, max_lag=0).speed == pytest.approx(1000)
    # The lag allows one more update ahead: 20 episodes at a time.
    assert predicted(SLEEPS, num_workers=100, max_lag=1).speed == pytest.approx(2000, rel=0.02)
    # Segments of 10 steps: 100 workers make 1,000 steps in 0.1 s.
    assert predicted(SLEEPS, num_workers=100, max_lag=0, segment_steps=10).speed == pytest.approx(10_000)


def test_a_learner_that_takes_longer_is_the_limit_whatever_collects() -> None:
    # A step takes 1 ms to learn from, and collecting goes on meanwhile.
    found = predicted(SLEEPS, learn_seconds=0.001, num_workers=100, max_lag=1, segment_steps=10)
    assert found.speed == pytest.approx(1000)
    assert found.learner_busy == pytest.approx(1.0)
    # Without lag they take turns: 0.1 s for 1,000 steps, and 1 s to learn from them.
    in_turns = predicted(SLEEPS, learn_seconds=0.001, num_workers=100, max_lag=0, segment_steps=10)
    assert in_turns.speed == pytest.approx(1000 / 1.1)


def test_several_environments_of_a_worker_are_as_fast_as_they_were_measured_together() -> None:
    # A unit of 4 × 25 steps takes 100 × 0.4 ms; two workers on two cores.
    assert predicted(COMPUTES, num_workers=2, max_lag=0, envs_per_worker=4, segment_steps=25).speed == pytest.approx(
        5000
    )
    # Ten whole episodes are dealt out to 2 × 4 environments: 8 of them, and then 2 that are each alone with a worker.
    # 8 · 100 steps by two workers at 0.4 ms take 0.16 s, 100 steps alone 0.1 s.
    whole = predicted(COMPUTES, num_workers=2, max_lag=0, envs_per_worker=4)
    assert whole.speed == pytest.approx(1000 / 0.26)
    # Workers beyond the cores add nothing.
    crowded = predicted(COMPUTES, num_workers=4, max_lag=0, envs_per_worker=4, segment_steps=25)
    assert crowded.speed == pytest.approx(5000, rel=0.21), "10 units are dealt out to 4 workers in 3 turns"


def test_what_handing_over_costs_is_spread_over_the_steps_of_a_unit() -> None:
    config = defaults.complete(config_of(steps_per_update=1000, num_workers=1, max_lag=0, segment_steps=50))
    found = measured(COMPUTES, config)
    # 0.1 ms per step and 10 ms per unit: 0.2 ms per step in units of 100, 0.11 ms in units of 1,000, 0.3 ms in those
    # of 50, and 0.12 ms in those of 500, besides the 1 ms of the environment.
    costs = (Overhead(0.0002, 0.0, 100.0), Overhead(0.00011, 0.0, 1000.0))
    found = dataclasses.replace(found, overheads={"freerun": costs})
    assert predict_candidate(found, Candidate("freerun", {}, config)).speed == pytest.approx(1 / 0.0013)
    longer = with_settings(config, {"segment_steps": 500})
    assert predict_candidate(found, Candidate("freerun", {}, longer)).speed == pytest.approx(1 / 0.00112)


# ---------------------------------------------------------------------------------------------- updates


def cost(minibatch: int, steps: int, per_step: float) -> UpdateCost:
    demand = {"steps": steps, "episodes": 0, "whole_episodes": True}
    return UpdateCost(demand, steps, per_step * steps, minibatch, steps, learner_of(config_of()))


def test_the_cost_of_an_update_is_interpolated_in_one_over_the_minibatch() -> None:
    known = (cost(64, 2048, 0.0005), cost(256, 8192, 0.0002))
    # a + b / m through both: b = 0.0003 / (1/64 − 1/256) = 0.0256, a = 0.0001; for 128: 0.0003.
    found = update_cost(known, config_of(minibatch_size=128, steps_per_update=4096))
    assert found.seconds_per_step == pytest.approx(0.0003)
    assert found.demand["steps"] == 4096
    assert update_cost(known, config_of(minibatch_size=512, steps_per_update=8192)).seconds_per_step == pytest.approx(
        0.0002
    ), "what is larger than all that was measured costs as much as the largest"


def test_a_larger_update_never_seems_to_cost_more_per_step() -> None:
    known = (cost(64, 1000, 0.0003), cost(64, 2000, 0.00033))
    assert update_cost(known, config_of(steps_per_update=2000)).seconds_per_step == pytest.approx(0.0003)


def test_few_sizes_of_updates_are_timed() -> None:
    configs = [
        config_of(steps_per_update=steps, minibatch_size=steps // 32) for steps in (2048, 1024, 4096, 8192, 10**6)
    ]
    timed = sizes_to_time([*configs, *configs])
    assert [found.algorithm.steps_per_update for found in timed] == [2048, 1024, 8192]
    assert max(found.algorithm.steps_per_update for found in timed) <= MOST_TIMED_STEPS
    other = [config_of(steps_per_update=2048), config_of(steps_per_update=2048, num_epochs=3)]
    assert len(sizes_to_time(other)) == 2, "another learner"


# ---------------------------------------------------------------------------------------------- the bounds


def test_memory_bounds_workers_environments_and_segments() -> None:
    env = dataclasses.replace(SLEEPS, megabytes=100.0, megabytes_per_env=50.0, bytes_per_step=1_000_000)
    # Half of 2,000 MB may be filled.
    found = limits(env, megabytes=2000.0)
    assert found.have_room_for(10)
    assert not found.have_room_for(11)
    # 5 workers with 3 environments: 5 · (100 + 2 · 50); with segments of 2 steps there are 3 · 2 · 3 MB more for each.
    assert found.have_room_for(5, 3)
    assert not found.have_room_for(5, 3, segment_steps=2)
    assert found.worker_counts == [1, 2, 4, 8, 10]
    assert limits(env, megabytes=10.0).worker_counts == [1], "one worker always fits"


def test_workers_outnumber_cores_only_where_steps_wait() -> None:
    assert limits(COMPUTES, cores=8).worker_counts == [1, 2, 8, 16]
    assert limits(SLEEPS, cores=2).worker_counts == [1, 2, 4, 8, 10, 16, 25, 32, 50, 64, 100]
    assert max(limits(SLEEPS, cores=64).worker_counts) == defaults.MOST_WORKERS


def test_several_environments_are_tried_only_where_they_are_faster_together() -> None:
    assert limits(SLEEPS).envs_per_worker == (1,)
    assert 32 in limits(COMPUTES).envs_per_worker


# ---------------------------------------------------------------------------------------------- what is open


def found_with(mode: str = "freerun", given: tuple[str, ...] = (), **settings: Any) -> list[AnyConfig]:
    search = Search({mode: config_of(mode, **settings)}, given)
    return [candidate.config for candidate in search.candidates(limits(COMPUTES))]


def values(configs: list[AnyConfig], name: str) -> set[Any]:
    """The values of a setting, where 0 stands for None: both stand for whole episodes."""
    return {getattr(config, name, None) or getattr(config.collector, name) or None for config in configs}


def test_what_is_not_given_is_open() -> None:
    configs = found_with(steps_per_update=2048)
    assert values(configs, "num_workers") == {1, 2, 4}
    assert values(configs, "envs_per_worker") == {1, 2, 4, 8, 16, 32, 64}
    lengths = {config.collector.segment_steps or None for config in configs}
    # An update of 2,048 steps has 1,024 of each of two environments, or four segments of 256; 64 · 4 would have 8.
    assert {None, 1024, 256} <= lengths
    assert min(length for length in lengths if length) == 16
    for config in configs:
        if config.collector.segment_steps:
            num_envs = config.num_workers * config.collector.envs_per_worker
            # Segments that are chosen by default may be as long as two updates hold.
            assert config.collector.segment_steps * num_envs <= 2 * 2048 + num_envs


@pytest.mark.parametrize(
    ("given", "settings", "name", "value"),
    [
        (("envs_per_worker",), {"envs_per_worker": 1}, "envs_per_worker", 1),  # the default, but typed
        (("envs_per_worker",), {"envs_per_worker": 3}, "envs_per_worker", 3),
        (("num_workers",), {"num_workers": 3}, "num_workers", 3),
        (("segment_steps",), {"segment_steps": 7}, "segment_steps", 7),
        ((), {"deterministic": True}, "segment_steps", None),
        ((), {"episodes_per_update": 4}, "segment_steps", None),
        ((), {"algo": "sac", "env": "Pendulum-v1"}, "segment_steps", None),  # it learns from single steps
    ],
)
def test_what_is_given_stays(given: tuple[str, ...], settings: dict[str, Any], name: str, value: Any) -> None:
    configs = found_with(given=given, **settings)
    assert len(configs) > 1, "the rest is open"
    assert values(configs, name) == {value}


def test_with_a_named_mode_the_number_of_workers_alone_is_chosen() -> None:
    search = Search({"freerun": config_of()}, workers_alone=True)
    assert search.open_settings("freerun") == ["num_workers"]


def test_memory_bounds_what_is_chosen_and_never_what_is_asked_for() -> None:
    scarce = limits(COMPUTES, megabytes=30.0)  # half of it holds one worker of 10 MB
    config = config_of(num_workers=50)
    found = Search({"freerun": config}, {"num_workers"}).candidates(scarce)
    assert [(entry.num_workers, entry.num_envs) for entry in found] == [(50, 50)]
    found = Search({"freerun": config_of()}, counts=(3, 50)).candidates(scarce)
    assert [entry.num_workers for entry in found] == [3, 50]


def test_bounds_of_adapt_rule_values_out() -> None:
    configs = found_with(adapt=True, adapt_max_envs_per_worker=4)
    assert values(configs, "envs_per_worker") == {1, 2, 4}
    assert values(configs, "segment_steps") == {None}, "--adapt could not move environments then"


@dataclass(frozen=True)
class TwoOptions(ModeOptions):
    envs_per_worker: int = 1
    num_stamps: int = 1


class EpisodesOfSeveral:
    """A mode with several environments per worker that cannot hand over segments."""

    traits = ModeTraits(options=TwoOptions, probe=ProbeModel(Predictor.SCHEDULED_UNITS))


class Letters:
    """A mode that could hand over segments and has no setting for it."""

    traits = ModeTraits(hands_over=HandedOver.EPISODES_OR_SEGMENTS, probe=ProbeModel(Predictor.SCHEDULED_UNITS))


@pytest.mark.parametrize(
    ("own", "open_settings"), [(EpisodesOfSeveral, ["num_workers", "envs_per_worker"]), (Letters, ["num_workers"])]
)
def test_a_mode_of_the_users_own_is_asked_for_its_settings(
    own: type, open_settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.MODES, "own", ModeEntry(f"{__name__}:{own.__name__}"))
    search = Search({"own": config_of("own", total_steps=10**6)})
    assert search.open_settings("own") == open_settings
    found = forecast(measured(COMPUTES, config_of()), search)
    assert len(found) == (3 * 7 if "envs_per_worker" in open_settings else 3)
    assert all(entry.speed > 0 for entry in found)


# ---------------------------------------------------------------------------------------------- completed configs


@pytest.fixture
def updates_grow(monkeypatch: pytest.MonkeyPatch) -> Callable[[AnyConfig], AnyConfig]:
    """Defaults with which an update has 64 steps of every environment, in 4 minibatches."""

    def complete(config: AnyConfig) -> AnyConfig:
        config = defaults.complete(config)
        steps = 64 * (config.num_workers or 1) * config.collector.envs_per_worker
        sizes = {"steps_per_update": steps, "minibatch_size": steps // 4}
        return dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, **sizes))

    monkeypatch.setattr(candidates, "complete", complete)
    return complete


@pytest.mark.usefixtures("updates_grow")
def test_every_candidate_is_completed_for_itself_and_predicted_with_that() -> None:
    search = Search({"freerun": config_of(total_steps=10**6, num_workers=2)})
    found = {entry.num_envs: entry for entry in forecast(measured(COMPUTES, config_of()), search)}
    assert {num_envs: entry.update_steps for num_envs, entry in found.items()} == {
        num_envs: 64 * num_envs for num_envs in (2, 4, 8, 16, 32, 64, 128)
    }


@pytest.mark.usefixtures("updates_grow")
def test_updates_do_not_grow_until_a_run_has_hardly_any() -> None:
    # Two workers and 100,000 steps: 32 updates of 3,125 steps are 64 steps of 48 environments.
    assert values(found_with(num_workers=2, total_steps=100_000), "envs_per_worker") == {1, 2, 4, 8, 16}
    assert values(found_with(num_workers=2, total_episodes=10), "envs_per_worker") == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.usefixtures("updates_grow")
def test_with_deterministic_the_choice_changes_nothing_that_is_learned() -> None:
    configs = found_with(deterministic=True, num_workers=2)
    assert values(configs, "envs_per_worker") == {1}, "more would enlarge the updates"
    assert {config.max_lag for config in configs} == {0}


# ---------------------------------------------------------------------------------------------- the choice, in words


def test_of_those_about_as_fast_the_fewest_environments_are_taken() -> None:
    fast = [
        Forecast("freerun", 2, 100.0, num_envs=64, segment_steps=32),
        Forecast("freerun", 2, 98.0, num_envs=16, segment_steps=128),
        Forecast("freerun", 4, 98.0, num_envs=16),
        Forecast("freerun", 1, 50.0, num_envs=1),
    ]
    assert auto_mode.pick(fast) is fast[2], "16 environments, in whole episodes"


def test_the_choice_is_said_with_the_next_best_and_as_a_command() -> None:
    settings = {"num_workers": 2, "envs_per_worker": 32, "segment_steps": 16}
    best = Forecast("freerun", 2, 38_000.0, settings=settings, num_envs=64, segment_steps=16)
    others = [Forecast("pipes", 2, 21_000.0, num_envs=2), Forecast("sequential", 1, 10_000.0, num_envs=1)]
    config = config_of()
    probe = Probe(measured(COMPUTES, config), [best, *others], {}, {"freerun": config})
    assert auto_mode.sentence(probe) == (
        "auto: freerun with 2 workers × 32 environments in segments of 16 steps, 38,000 steps/s predicted "
        "(3.8 × sequential; next pipes with 2 workers, 21,000): "
        "steps compute all their time, so the cores are the limit"
    )
    assert command(best, ["X-v0"]) == (
        "freerun train X-v0 --mode freerun --num-workers 2 --envs-per-worker 32 --segment-steps 16"
    )
    assert command(best, ["X-v0", "--segment_steps=16", "--mode", "freerun"]) == (
        "freerun train X-v0 --segment_steps=16 --mode freerun --num-workers 2 --envs-per-worker 32"
    )


def test_flags_that_were_typed_are_known_by_name() -> None:
    words = ["CartPole-v1", "--mode", "auto", "--envs_per_worker=1", "--no-normalize-obs", "--num-workers", "auto"]
    given = Flags.read(words, None).given
    assert {"envs_per_worker", "normalize_obs"} <= given
    assert not {"mode", "segment_steps"} & given
    assert "segment_steps" in Flags.read(["CartPole-v1", "--segment-steps", "9"], None).given
