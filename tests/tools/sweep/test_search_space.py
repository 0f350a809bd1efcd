"""What a sweep varies: ranges and lists as users write them, and sentences for what cannot be varied."""

from __future__ import annotations

from typing import Any

import pytest

from freerun.core import UserError
from freerun.settings.registry import make_config
from freerun.tools.cli.main import main
from freerun.tools.cli.sweep_command import split_vary
from freerun.tools.sweep.search_space import Dimension, combinations, pack, read_dimensions, unpack, with_values

CONFIG = make_config({"env": "CartPole-v1", "env_args": {"sutton_barto_reward": True}})


def read(name: str, *words: Any) -> Dimension:
    (dimension,) = read_dimensions({name: list(words)}, CONFIG)
    return dimension


def test_a_range_has_the_kind_of_the_setting() -> None:
    assert read("learning-rate", "1e-5:1e-2:log") == Dimension("learning_rate", (), 1e-5, 1e-2, is_log=True)
    rate = read("learning-rate", "1:2")
    assert (rate.low, rate.is_whole) == (1.0, False)
    epochs = read("--num-epochs", "2:10")
    assert (epochs.low, epochs.high, epochs.is_whole, epochs.is_log) == (2, 10, True, False)


def test_listed_values_are_read_as_the_flag_reads_them() -> None:
    assert read("hidden-sizes", "64,64", "256").values == ((64, 64), (256,))
    assert read("deterministic", "True", "False").values == (True, False)
    assert read("normalize-obs", "True", "None").values == (True, None)
    assert read("activation", "tanh", "relu").values == ("tanh", "relu")
    assert read("env-args", "size=7", "size=9").values == ({"size": 7}, {"size": 9})
    assert read("hidden_sizes", (8,), [8, 8]).texts == ["8", "8,8"]


def test_a_trial_keeps_the_arguments_of_the_environment_that_are_not_varied() -> None:
    config = with_values(CONFIG, {"env_args": {"size": 7}, "gamma": 0.5, "total_steps": 10})
    assert config.env_args == {"sutton_barto_reward": True, "size": 7}
    assert (config.algorithm.gamma, config.total_steps) == (0.5, 10)


def test_a_grid_has_every_combination() -> None:
    dimensions = read_dimensions({"hidden_sizes": ["8", "8,8"], "num_epochs": [1, 2, 3]}, CONFIG)
    found = [(trial["hidden_sizes"], trial["num_epochs"]) for trial in combinations(dimensions)]
    assert found == [(size, epochs) for size in ("8", "8,8") for epochs in ("1", "2", "3")]


def test_what_is_varied_survives_its_file() -> None:
    vary = {"learning_rate": "1e-5:1e-2:log", "num_epochs": "2:10", "hidden_sizes": ["64,64", "8"]}
    dimensions = read_dimensions(vary, CONFIG)
    assert unpack(pack(dimensions), CONFIG) == dimensions
    with pytest.raises(UserError, match="cannot be read"):
        unpack([{"low": 1}], CONFIG)


def test_values_end_where_the_next_flag_begins() -> None:
    line = "CartPole-v1 --vary gamma 0.9:0.99 --seed 3 --vary ent-coef -1:1 0 -q --vary hidden-sizes 8 8,8"
    vary, rest = split_vary(line.split())
    assert vary == {"gamma": ["0.9:0.99"], "ent-coef": ["-1:1", "0"], "hidden-sizes": ["8", "8,8"]}
    assert rest == ["CartPole-v1", "--seed", "3", "-q"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "varies at least one setting"),
        ("--vary lerning-rate 0.1:0.2", "did you mean learning-rate?"),
        ("--vary tau 0.1:0.2", "belongs to --algo"),
        ("--vary learning-rate", "has no values"),
        ("--vary learning-rate 0.2:0.1", "the range is empty"),
        ("--vary learning-rate 0.1:0.1", "the range is empty"),
        ("--vary learning-rate 0:0.1:log", "must begin above 0"),
        ("--vary learning-rate 0.1:0.2:linear", "LOW:HIGH:log"),
        ("--vary learning-rate 0.1:inf", "finite"),
        ("--vary total-steps -1:10", "must be at least 1"),
        ("--vary hidden-sizes 8:16", "takes no numbers"),
        ("--vary hidden-sizes 8 8", "names a value twice"),
        ("--vary gamma 0.9:0.99 --vary gamma 0.5:0.6", "is given twice"),
        ("--vary --vary gamma 0.9:0.99", "names no flag"),
        ("--vary seed 1:3", "--seeds-per-trial"),
        ("--vary algo ppo sac", "a sweep for each algorithm"),
        ("--vary gamma 0.9:0.99 --trials 0", "trials must be at least 1"),
        ("--vary gamma 0.9:0.99 --sampler grid", "list its values"),
        ("--vary gamma 0.9:0.99 --sampler halving --cost seconds", "contradicts --cost"),
        ("--vary gamma 0.9:0.99 --num-learners 2", "one learner"),
        ("--vary gamma 0.9:0.99 --resume nowhere", "leave --vary out"),
        ("--resume nowhere", "holds no sweep"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    env = [] if words.startswith("--resume") else ["CartPole-v1"]
    assert main(["sweep", *env, *words.split()]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_optuna_it_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    assert main(["sweep", "CartPole-v1", "--vary", "gamma", "0.9:0.99"]) == 2
    assert "freerun sweep needs Optuna: pip install 'freerun[sweep]'" in capsys.readouterr().err
