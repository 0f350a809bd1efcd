"""Pictures of the drone's flight: sizes, what changes between two of them, and where things are."""

from __future__ import annotations

import numpy as np
import pytest

from freerun.core import UserError
from freerun_envs.drone_physics import HOVER_ACTION
from freerun_envs.drone_pictures import (
    DRONE_COLOUR,
    GOAL_COLOUR,
    VIEWS,
    FlightPicture,
    Picture,
    view_from_above,
    view_in_3d,
)
from freerun_envs.rough_drone import RoughDrone
from freerun_envs.terrain import height_field

SIZES = {"above": (392, 320, 3), "3d": (360, 560, 3)}
HEIGHTS = height_field(0, 0)


def pixels_of(picture: Picture, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows and columns, [pixels, 2]."""
    return np.argwhere((picture == colour).all(-1))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("task", ["explore", "hover"])
def test_frames_of_a_flight_have_one_size_and_differ(task: str, view: str) -> None:
    env = RoughDrone(task=task, render_mode="rgb_array", view=view)
    env.reset(seed=0)
    frames = [env.render()]
    for _ in range(3):
        for _ in range(8):
            env.step(np.array(HOVER_ACTION, np.float32) + np.array([0.2, 0.0, 0.02, 0.0], np.float32))
        frames.append(env.render())
    assert {frame.shape for frame in frames} == {SIZES[view]}
    assert {frame.dtype for frame in frames} == {np.dtype(np.uint8)}
    assert len({frame.tobytes() for frame in frames}) == 4
    assert np.array_equal(env.render(), frames[-1]), "nothing has happened since"
    assert env.path.shape == (25, 3)
    env.reset(seed=0)
    assert np.array_equal(env.render(), frames[0]), "a new episode begins with an empty picture"


def test_pictures_can_be_left_out_between_two() -> None:
    """A picture shows the whole path, whether or not there were pictures on the way."""
    path = np.cumsum(np.full((30, 3), 0.1), 0) + np.array((0.0, 0.0, 3.0))
    seen = np.zeros((40, 40), bool)
    seen[20:24, 20:24] = True
    for view in VIEWS:
        often, once = (FlightPicture(view, HEIGHTS, 6.0) for _ in range(2))
        for length in range(1, 30):
            often.draw(path[:length], seen, None)
        assert np.array_equal(often.draw(path, seen, None), once.draw(path, seen, None))


def test_the_map_by_hand() -> None:
    """8 pixels a metre; x = -20 is the left edge and y = 20 the upper one."""
    path = np.array([(10.0, 10.0, 3.0), (10.0, 10.0, 3.0)])
    seen = np.zeros((40, 40), bool)
    seen[5, 7] = True  # y from -15 to -14, x from -13 to -12
    picture = FlightPicture("above", HEIGHTS, 6.0)
    shown = picture.draw(path, seen, np.array([-10.0, 0.0, 2.0]))
    assert pixels_of(shown[:320], DRONE_COLOUR).mean(0) == pytest.approx((80 - 0.5, 240 - 0.5))
    assert pixels_of(shown[:320], GOAL_COLOUR).mean(0) == pytest.approx((160 - 0.5, 80 - 0.5))
    clear = view_from_above(HEIGHTS).clear
    same = np.argwhere((shown[:320] == clear).all(-1))
    assert same.min(0).tolist() == [34 * 8, 7 * 8]
    assert same.max(0).tolist() == [35 * 8 - 1, 8 * 8 - 1]


def test_the_view_in_3d_hides_what_is_behind_a_hill() -> None:
    # A ridge along x through the middle, 6 m high and 6 m wide. The camera is in the south.
    y = np.linspace(-20.0, 20.0, len(HEIGHTS))
    heights = np.clip(6.0 - 2.0 * abs(y), 0.0, 6.0)[:, None].repeat(len(y), 1).astype(np.float32)
    view = view_in_3d(heights)
    north, south, above = view.project(np.array([(0.0, 5.0, 0.0), (0.0, -5.0, 0.0), (0.0, 5.0, 8.0)]))
    assert above[1] < north[1] < south[1], "what is higher or further away is higher in the picture"
    assert north[2] > south[2]

    def num_path_pixels(y: float) -> int:
        """Of a path parallel to the ridge, 1 m high."""
        picture = FlightPicture("3d", heights, 6.0).draw(np.array([(x, y, 1.0) for x in range(-6, 7)]), None, None)
        red, green, blue = picture.astype(int).transpose(2, 0, 1)
        return int(((red > 130) & (green > 110) & (blue < 12)).sum())

    assert num_path_pixels(-5.0) > 200
    assert num_path_pixels(5.0) == 0


def test_an_unknown_view_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="no view 'below': use above or 3d"):
        RoughDrone(view="below")


def test_without_a_render_mode_nothing_is_drawn() -> None:
    env = RoughDrone(task="hover")
    env.reset(seed=0)
    assert env.render() is None
