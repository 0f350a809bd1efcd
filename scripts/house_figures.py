"""Counts what CHANGELOG says about the source: `python scripts/house_figures.py [CHECKOUT]`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of all docstrings, also those under a field or a constant."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        for part in getattr(node, "body", []) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []:
            is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
            if is_text and isinstance(part.value.value, str):
                lines |= set(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return lines


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "src"
    paths = sorted(root.rglob("*.py"))
    totals: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    files = Counter(path.name for path in paths if path.name not in ("__init__.py", "__main__.py"))
    longest = max((len(path.read_text().splitlines()), path.relative_to(root).as_posix()) for path in paths)
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        code = {line for one in tokens if one.type not in NO_CODE for line in range(one.start[0], one.end[0] + 1)}
        totals["lines"] += len(text.splitlines())
        totals["lines of code"] += len(code - docstring_lines(tree))
        totals["comments"] += sum(one.type == tokenize.COMMENT for one in tokens)
        totals["Any"] += len(re.findall(r"\bAny\b", text))
        totals["getattr and hasattr"] += len(re.findall(r"\b(?:get|has)attr\(", text))
        classes.update(node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    print(f"modules: {len(paths)}")
    for name, count in totals.items():
        print(f"{name}: {count:,}")
    print(f"comments per 100 lines: {100 * totals['comments'] / totals['lines']:.1f}")
    print(f"comments per 100 lines of code: {100 * totals['comments'] / totals['lines of code']:.1f}")
    print(f"longest file: {longest[1]}, {longest[0]} lines")
    print(f"class names that occur twice: {sum(count > 1 for count in classes.values())}")
    print(f"file names that occur twice: {sum(count > 1 for count in files.values())}")


if __name__ == "__main__":
    main()
