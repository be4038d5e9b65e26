"""How much code chooses tilings and orders, counted: `python tests/choosing.py [folder of a checkout]`.

A branch point is an `if`, `for`, `while` or `case`, an exception that is caught, a conditional expression, a
comprehension and each of its conditions, and each operand of `and` and `or` behind the first. Rows of a table are lines
and no branch points. Lines are all lines of a file: comments say what was measured, and are read too. Rows of files of
tables (`*.json`) are data, and counted apart.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

# A choice: how a call is cut, and in which order its tiles run. Records of tilings count, as what follows from their
# fields is a choice too; tables on the device (`work`) don't, nor do rewrites of calls (strips, residues, widened)
FILES = {
    "fused": "cut facts few_queries order scheduler tables tiling traits",
    "hopper": "backward_choice backward_tiling forward_choice fp8_tiling tiling wide_tiling",
    "blackwell": "backward_tiling tiling",
    "warp": "tiling",
}
"""By folder of `composattn/backends`, at any depth in it. A new file that chooses is added here."""


class Count(NamedTuple):
    """How much a file, or several, have."""

    lines: int
    branches: int


def branches(tree: ast.AST) -> int:
    """Its branch points."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.match_case):
            found += 1
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
    return found


def counted(root: Path = ROOT) -> dict[str, Count]:
    """By file. Raises: `ValueError` where a file is not there, or twice."""
    found = {}
    for folder, names in FILES.items():
        for name in names.split():
            paths = list((root / "composattn" / "backends" / folder).rglob(f"{name}.py"))
            if len(paths) != 1:
                raise ValueError(f"{len(paths)} files of backends/{folder} are called {name}.py; see tests/choosing.py")
            text = paths[0].read_text()
            found[str(paths[0].relative_to(root))] = Count(len(text.splitlines()), branches(ast.parse(text)))
    return found


def rows(root: Path = ROOT) -> dict[str, int]:
    """How many rows each file of tables has."""
    files = sorted((root / "composattn" / "backends").rglob("*.json"))
    return {str(f.relative_to(root)): sum(map(len, json.loads(f.read_text())["tables"].values())) for f in files}


def summed(counts: dict[str, Count]) -> Count:
    return Count(*map(sum, zip(*counts.values(), strict=True)))


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT
    files = counted(root)
    for file, found in files.items():
        print(f"{found.lines:6} lines {found.branches:4} branch points  {file}")
    print(f"{summed(files).lines:6} lines {summed(files).branches:4} branch points in {len(files)} files")
    for file, count in rows(root).items():
        print(f"{count:6} rows  {file}")
