"""What sites share, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from freerun.core import UserError
from freerun.tools.federation.moment_merging import make_moments
from freerun.tools.federation.shared_state import SharedState, fitted, most_usual, unpack_moments

GOOD = SharedState({"net/w": np.ones((2, 3), np.float32)}, {"obs": make_moments(3, [1.0, 2.0], [0.5, 0.0])})


def with_weights(array: object) -> SharedState:
    return SharedState({"net/w": np.asarray(array)}, GOOD.moments)


def with_moments(count: float, mean: object, variance: object) -> SharedState:
    return SharedState(GOOD.weights, {"obs": make_moments(count, mean, variance)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        (with_weights(np.full((2, 3), np.nan)), "its weights net/w are not finite"),
        (with_weights(np.full((2, 3), np.inf)), "its weights net/w are not finite"),
        (with_weights(np.full((2, 3), 1e300)), "its weights net/w are not finite"),  # in float32
        (with_weights(np.ones((3, 2))), r"its weights net/w have the shape \(3, 2\), not \(2, 3\)"),
        (with_weights(np.ones((2, 3), np.int64)), "its weights net/w are not finite"),
        (SharedState({}, GOOD.moments), "its weights are those of another network: net/w"),
        (SharedState(GOOD.weights, {}), "its moments are those of another network: obs"),
        (with_moments(np.nan, [1.0, 2.0], [0.5, 0.0]), "its moments obs are no moments"),
        (with_moments(-1, [1.0, 2.0], [0.5, 0.0]), "its moments obs are no moments"),
        (with_moments(3, [1.0, np.inf], [0.5, 0.0]), "its moments obs are no moments"),
        (with_moments(3, [1.0, 2.0], [-0.5, 0.0]), "its moments obs are no moments"),
        (with_moments(3, [1.0], [0.5]), r"its moments obs have the shape \(1,\), not \(2,\)"),
    ],
)
def test_garbage_is_refused_with_the_reason(shared: SharedState, reason: str) -> None:
    fitted(GOOD, GOOD)
    with pytest.raises(UserError, match=f"^{reason}"):
        fitted(shared, GOOD)


def test_what_fits_gets_our_number_types() -> None:
    found = fitted(with_weights(np.full((2, 3), 0.1)), GOOD).weights["net/w"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.full((2, 3), 0.1, np.float32))


def test_a_minority_cannot_choose_what_all_begin_with() -> None:
    rng = np.random.default_rng(0)
    honest = [SharedState({"net/w": rng.standard_normal((2, 3)).astype(np.float32)}, GOOD.moments) for _ in range(3)]
    other_network = SharedState({"net/v": np.zeros(3, np.float32)}, GOOD.moments)
    poisoned_weights = with_weights(np.full((2, 3), 1e6, np.float32))
    poisoned_moments = SharedState(honest[0].weights, {"obs": make_moments(1e300, [1e6, 2.0], [0.5, 0.0])})
    for bad in (other_network, poisoned_weights, poisoned_moments):
        assert any(most_usual([bad, *honest]) is state for state in honest)
    assert most_usual([GOOD]) is GOOD


def test_parts_can_be_left_out() -> None:
    state = SharedState({"net/actor.0": np.ones(2, np.float32), "net/critic.0": np.ones(3, np.float32)}, GOOD.moments)
    left = state.without(("net/critic",))
    assert left.weights.keys() == {"net/actor.0"}
    assert left.moments is GOOD.moments


def test_moments_travel_bit_for_bit() -> None:
    moments = {
        "obs": make_moments(7, np.random.default_rng(0).random(4), [1, 2, 3, 4]),
        "reward": make_moments(1, 2, 3),
    }
    back = unpack_moments(SharedState({}, moments).packed_moments())
    assert back.keys() == moments.keys()
    for path, theirs in back.items():
        assert theirs.count == moments[path].count
        np.testing.assert_array_equal(theirs.mean, moments[path].mean)
        np.testing.assert_array_equal(theirs.variance, moments[path].variance)
    assert SharedState({}, back).has_statistics
    assert not SharedState({}, {"obs": make_moments(0, 0, 1)}).has_statistics


@pytest.mark.parametrize("packed", [b"", b"garbage of any kind", SharedState({}, {}).packed_moments()[:5]])
def test_moments_that_cannot_be_read_are_refused(packed: bytes) -> None:
    with pytest.raises(UserError, match="its moments cannot be read"):
        unpack_moments(packed)
