"""`make test` gives all tests of a file to one process, so that they share fixtures."""

from __future__ import annotations

import pytest


def test_xdist_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    """xdist takes the group from the end of a test's name, where pytest 9.2 did not let it write any more."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("groups are for --dist loadgroup, as in `make test`")
    assert request.node.nodeid.endswith("@tests/test_groups.py")
