"""Which files of tests a change can break: `python -m tests.affected FILE...`, as `make test-of FILES="..."` runs them.

A file of tests is one of them if it uses a changed file, as `reached.json` has it; or uses one that imports data from
it: a constant, or a class, whose fields count where no method runs. An import counts wherever it stands, inside of
functions too. What the record does not know is asked from the sources alone. A file of tests that it lacks uses all
that it imports, and everything where it opens files or starts programs. A changed file that is new or has moved is used
by who uses what imports it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from tests import reached
from tests.rooms import ROOT, File

FOLDERS = ("composattn", "tests", "benchmarks", "docs", "recipes")
ANYTHING = re.compile(r"\b(ROOT|__file__|subprocess|runpy|import_module)\b")  # of files that no import names
ALL = ("tests/conftest.py", "tests/support.py", "pyproject.toml")  # what every test runs with


class Tree:
    """The Python files of a checkout, and who imports which names of whom."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.files = {path: _file(path, source) for path, source in sources.items()}
        self.paths = {file.module: path for path, file in self.files.items()}

    @classmethod
    def at(cls, root: Path = ROOT) -> Tree:
        found = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
        return cls({str(path.relative_to(root)): path.read_text() for path in found})

    @property
    def tests(self) -> list[str]:
        return [path for path in self.files if path.startswith("tests/") and Path(path).name.startswith("test_")]

    @cached_property
    def imported(self) -> dict[str, dict[str, set[str]]]:
        """By importing file, and by the file that it imports: which names, "" for the module itself."""
        found: dict[str, dict[str, set[str]]] = {}
        for path, file in self.files.items():
            by = found.setdefault(path, {})
            for dotted in file.imports():
                module, _, name = dotted.rpartition(".")
                if dotted in self.paths:
                    by.setdefault(self.paths[dotted], set()).add("")
                elif module in self.paths:
                    by.setdefault(self.paths[module], set()).add(name)
        return found

    def importers(self, path: str) -> set[str]:
        return {by for by, of in self.imported.items() if path in of}

    def data_importers(self, path: str) -> set[str]:
        """Files that import more than functions of a file, and those that import what these make of it."""
        found: set[str] = set()
        waiting = [path]
        while waiting:
            source = waiting.pop()
            functions = {node.name for node in self.files[source].tree.body if isinstance(node, ast.FunctionDef)}
            for by in self.importers(source) - found - {path}:
                if self.imported[by][source] - functions:
                    found.add(by)
                    if self._makes_data_of(by, source):
                        waiting.append(by)
        return found

    def _makes_data_of(self, by: str, source: str) -> bool:
        """Whether a file's own constants or classes are made of what it imports, or it hands it on."""
        body = self.files[by].tree.body
        imports = [node for node in body if isinstance(node, ast.ImportFrom | ast.Import)]
        taken = {alias.asname or alias.name for node in imports for alias in node.names}
        taken &= self.imported[by][source] | {Path(source).stem}
        handed_on = Path(by).name == "__init__.py"
        made = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef | ast.Expr)]
        used = {name.id for node in made for name in ast.walk(_outside(node)) if isinstance(name, ast.Name)}
        return bool(taken) and (handed_on or bool(used & taken))

    def opens_files(self, path: str) -> bool:
        return ANYTHING.search(self.files[path].source) is not None

    def closure(self, path: str) -> set[str]:
        """All that a file imports, and what these import."""
        found, waiting = {path}, [path]
        while waiting:
            more = set(self.imported[waiting.pop()]) - found
            found |= more
            waiting += more
        return found


def _outside(node: ast.stmt) -> ast.AST:
    """A class with no bodies of its methods: these run when they are called."""
    if not isinstance(node, ast.ClassDef):
        return node
    fields = [inner for inner in node.body if not isinstance(inner, ast.FunctionDef)]
    return ast.Module([*map(ast.Expr, [*node.bases, *node.decorator_list]), *fields], [])


def _file(path: str, source: str) -> File:
    parts = Path(path).with_suffix("").parts
    package = parts[-1] == "__init__"
    return File(".".join(parts[:-1] if package else parts), source, package)


def affected(changed: Iterable[str], tree: Tree, record: Mapping[str, set[str]]) -> list[str]:
    """Files of tests that a change of some files can break, in order.

    `changed`: from the root of the checkout; a file that is gone counts too.
    """
    changed = list(changed)
    if set(ALL) & set(changed):
        return tree.tests
    known = set().union(*record.values())
    used = {path for name in changed for path in _used_with(name, tree, known)}
    return [
        test
        for test in tree.tests
        if test in changed
        or (used & record[test] if test in record else tree.opens_files(test) or used & tree.closure(test))
    ]


def _used_with(changed: str, tree: Tree, known: set[str]) -> set[str]:
    """Files such that who uses one of them may use a changed one."""
    if changed not in tree.files:
        return {changed}
    if changed in known:
        return {changed} | tree.data_importers(changed)
    found, waiting = {changed}, [changed]
    while waiting:  # up to the first ones that the record knows
        for by in tree.importers(waiting.pop()) - found:
            found.add(by)
            waiting += [by] if by not in known else []
    return found


if __name__ == "__main__":
    print(*affected(sys.argv[1:], Tree.at(), reached.recorded()))
