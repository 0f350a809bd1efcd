"""Rules of the house that a linter does not know: unique names, and modes, algorithms and trackers known by traits."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from freerun.settings import registry

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
NAMES = {*registry.MODES, *registry.ALGORITHMS, *registry.TRACKERS}
AT_HOME = ("freerun/settings/registry.py", "freerun/collecting/modes/")
"""Where names of modes, algorithms and trackers belong."""


def test_no_class_and_no_file_has_the_name_of_another() -> None:
    trees = [ast.parse(path.read_text()) for path in MODULES]
    classes = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    files = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert [name for name, number in (classes + files).items() if number > 1] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_nobody_compares_the_names_of_modes_algorithms_or_trackers(path: Path) -> None:
    """What differs between two of a kind is a trait that each declares."""
    if path.relative_to(SOURCE).as_posix().startswith(AT_HOME):
        return
    compared = [
        constant.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.Match)
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    ]
    assert [name for name in compared if name in NAMES] == []
