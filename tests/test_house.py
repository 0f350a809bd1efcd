"""Rules of the house that a linter does not know.

Names are unique; modes, algorithms and trackers are known by their traits; tests use what a module offers to others.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from freerun.settings import registry

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = Path(__file__).parent
TEST_MODULES = sorted(TESTS.rglob("*.py"))
NAMES = {*registry.MODES, *registry.ALGORITHMS, *registry.TRACKERS}
AT_HOME = ("freerun/settings/registry.py", "freerun/collecting/modes/")
"""Where names of modes, algorithms and trackers belong."""
PUBLIC_IN_SPITE_OF_THEIR_NAME = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}
"""What the standard library documents for everybody: methods of named tuples, os._exit and sys._getframe."""

NO_OTHER_WAY = {"_id"}
"""pytest's name of a test, to which conftest.py must add what xdist 3.8 adds to another attribute in vain."""


def test_no_class_and_no_file_has_the_name_of_another() -> None:
    trees = [ast.parse(path.read_text()) for path in MODULES]
    # A leading underscore does not make two names different for a reader.
    classes = Counter(
        node.name.lstrip("_") for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    files = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert [name for name, number in (classes + files).items() if number > 1] == []


def test_the_glossary_stays_short_and_has_each_word_once() -> None:
    """A reader learns forty words before the code. What a single room talks of is explained there."""
    text = (TESTS.parent / "ARCHITECTURE.md").read_text()
    table = text.partition("## Words")[2].partition("## ")[0]
    words = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][2:]
    assert "segment" in words
    assert len(words) == len(set(words)) <= 40


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


@pytest.mark.parametrize("path", TEST_MODULES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_tests_leave_private_names_of_other_modules_alone(path: Path) -> None:
    """A test that looks at the inside of a module breaks whenever that is rewritten, though nothing else does."""
    tree = ast.parse(path.read_text())
    own = set(_own_names(tree)) | PUBLIC_IN_SPITE_OF_THEIR_NAME | NO_OTHER_WAY
    assert [f"line {line}: {name}" for line, name in _used_names(tree) if _is_private(name) and name not in own] == []


def _own_names(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines, and the attributes that its classes give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr


def _used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names of all attributes, of what is imported, and of what `setattr` is given as a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            texts = [part.value for part in node.args if isinstance(part, ast.Constant)]
            yield from ((node.lineno, text.rpartition(".")[2]) for text in texts if isinstance(text, str))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
