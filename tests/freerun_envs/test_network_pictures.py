"""NetworkDefence draws itself: the picture shows what red holds, what both sides did, and the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import freerun
from freerun.tools.cli.main import main
from freerun_envs import network_pictures
from freerun_envs.network_actions import ACTION_NAMES
from freerun_envs.network_hosts import HOSTS
from freerun_envs.network_pictures import ACCESS_COLOURS, CARD_COLOURS, HEIGHT, WIDTH, describe_alert, describe_red
from freerun_envs.network_red import EXPLOIT, FAILED, FOUND_NOTHING, IDLE, SCAN, SUCCEEDED, SWEEP
from freerun_envs.single_network import NetworkDefence
from freerun_envs.workflow import WorkflowEnv

ORDER = "op_server,enterprise,op_host,defender,user"


def area(picture: Any, colour: tuple[int, int, int]) -> int:
    return int((picture == np.array(colour, np.uint8)).all(axis=-1).sum())


def make(**more: Any) -> NetworkDefence:
    return NetworkDefence(render_mode="rgb_array", **more)


def test_a_host_that_red_takes_changes_its_colour() -> None:
    """A card of a host has the colour of red's access: at first one of thirteen is lost, later as many as the truth."""
    env = make()
    env.reset(seed=3)
    first = env.render()
    assert first.shape == (HEIGHT, WIDTH, 3)
    assert first.dtype == np.uint8
    one_card = area(first, CARD_COLOURS[2])
    assert one_card > 5000
    assert area(first, CARD_COLOURS[1]) == 0
    for _ in range(25):
        env.step(np.int64(0))
    status = env.host_status()
    lost = int((status == 2).sum())
    assert lost >= 3
    assert area(env.render(), CARD_COLOURS[2]) == pytest.approx(lost * one_card, rel=0.1)


def test_what_is_shown_is_what_happened() -> None:
    env = make(episode_steps=30)
    env.reset(seed=3)
    assert env.view().blue == "has not acted yet"
    total = 0.0
    for _ in range(20):
        action = ACTION_NAMES.index("Restore User1")
        _, reward, *_ = env.step(np.int64(action))
        total += reward
    view = env.view()
    assert (view.num_steps, view.episode_steps) == (20, 30)
    assert view.scores[-1] == pytest.approx(total)
    assert len(view.scores) == 21
    assert view.blue == "Restore User1"
    assert view.blue_host == HOSTS.index("User1")
    assert view.access == env.host_status().tolist()
    before = env.render()
    env.step(np.int64(ACTION_NAMES.index("Sleep")))
    assert env.view().blue_host is None
    assert not np.array_equal(before, env.render())
    env.reset(seed=4)
    assert (env.view().num_steps, env.view().scores) == (0, [0.0])


def test_a_decoy_and_a_decoy_that_does_not_fit() -> None:
    env = make()
    env.reset(seed=0)
    for action in ("DecoySSHD User2", "DecoySSHD User2"):
        env.step(np.int64(ACTION_NAMES.index(action)))
    view = env.view()
    assert view.num_decoys[HOSTS.index("User2")] == 1
    assert sum(view.num_decoys) == 1
    assert view.blue == "DecoySSHD User2, which does not fit there"


def test_words() -> None:
    user1 = HOSTS.index("User1")
    assert describe_red(SWEEP, user1, SUCCEEDED) == "looks for hosts in the user subnet"
    assert describe_red(EXPLOIT, user1, FAILED) == "exploits a service of User1, in vain"
    assert describe_red(SCAN, user1, FOUND_NOTHING) == "scans User1, and finds nothing"
    assert describe_red(IDLE, 0, 0) == "waits"
    assert [describe_alert(bits) for bits in ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 1), (0, 0, 1, 1))] == [
        "",
        "scan seen",
        "exploit seen",
        "suspect: root",
    ]


def test_every_agent_and_every_action_can_be_drawn() -> None:
    for red_agent in ("RedMeanderAgent", "SleepAgent"):
        env = make(red_agent=red_agent, episode_steps=3)
        env.reset(seed=1)
        for action in (0, 20, 144):
            env.step(np.int64(action))
            assert area(env.render(), ACCESS_COLOURS[0]) > 0


def test_without_a_render_mode_nothing_is_drawn_and_nothing_is_kept() -> None:
    env = NetworkDefence()
    env.reset(seed=1)
    env.step(np.int64(0))
    assert env.render() is None
    assert env.view().scores == [0.0]


def test_pictures_do_not_change_the_episode() -> None:
    plain, drawn = NetworkDefence(), make()
    for env in (plain, drawn):
        env.reset(seed=5)
    for action in range(0, 100, 7):
        one, two = plain.step(np.int64(action)), drawn.step(np.int64(action))
        drawn.render()
        np.testing.assert_array_equal(one[0], two[0])
        assert one[1] == two[1]


def test_it_draws_under_a_workflow_and_by_its_name() -> None:
    for env in (
        gymnasium.make("freerun/NetworkDefence-v0", render_mode="rgb_array"),
        WorkflowEnv("freerun/NetworkDefence-v0", ORDER, 10.0, render_mode="rgb_array"),
    ):
        assert env.render_mode == "rgb_array"
        env.reset(seed=1)
        picture: Any = env.render()
        assert picture.shape == (network_pictures.HEIGHT, network_pictures.WIDTH, 3)


@pytest.mark.parametrize("more", [[], ["--workflow", ORDER]])
def test_eval_films_a_defender(more: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What README says of the run that `make train` makes."""
    from PIL import Image

    words = ["train", "--preset", "defender", "--episode-steps", "12", "--total-episodes", "4", "-q", *more]
    assert main([*words, "--num-workers", "1", "--episodes-per-update", "2", "--run-dir", str(run_dir)]) == 0
    capsys.readouterr()
    film = run_dir / "film"
    assert main(["eval", str(run_dir), "--episodes", "2", "--render", str(film)]) == 0
    shown = capsys.readouterr()
    if shown.err:
        assert shown.err.startswith("No ffmpeg was found, so the films are GIFs")
    else:
        pytest.skip("there is ffmpeg here, and the films are mp4")
    assert len(list(film.glob("*.gif"))) == 2
    with Image.open(film / "episode-0.gif") as picture:
        assert picture.size == (WIDTH, HEIGHT)
        assert picture.n_frames == 13  # type: ignore[attr-defined]
        assert picture.info["duration"] == 250, "four steps a second can be followed"
    assert freerun.evaluate(run_dir, episodes=1, render=film).pictures == [film / "episode-0.gif"]
