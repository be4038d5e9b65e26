"""Which files of the tree the tests of each file use, as one run of them recorded: `make reached`, see `affected.py`.

A file is used where a function of it ran, in whatever way it was imported, or where it was read as text (a page, a
kernel whose source the kernel language reads). The profiler is C code and costs a test about a third of its time.
"""

from __future__ import annotations

import cProfile
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("reached.json")
IGNORED = {".git", ".venv", "__pycache__", ".pytest_cache", ".hypothesis", "build", "dist", "site"}

Used = dict[str, set[str]]  # files of the tree, by test file


class Recorder:
    """Collects what runs and what is read inside of `test`, for the file of tests that it is told."""

    def __init__(self) -> None:
        self.used: Used = {}
        self._files: set[str] | None = None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self._files is not None and isinstance(arguments[0], str):
            self._files.add(arguments[0])

    @contextmanager
    def test(self, path: Path) -> Iterator[None]:
        """What runs inside belongs to a file of tests."""
        profiler = cProfile.Profile(builtins=False)
        self._files = set()
        profiler.enable()
        try:
            yield
        finally:
            profiler.disable()
            codes = (entry.code for entry in profiler.getstats())
            # the body of a module runs with whichever test imports it first
            ran = {code.co_filename for code in codes if not isinstance(code, str) and code.co_name != "<module>"}
            files, self._files = self._files | ran, None
            self.used.setdefault(str(path.relative_to(ROOT)), set()).update(in_tree(files))


def in_tree(files: set[str]) -> set[str]:
    """The files that belong to the checkout, from its root."""
    inside = (Path(name).relative_to(ROOT) for name in files if name.startswith(f"{ROOT}/"))
    return {str(path) for path in inside if not IGNORED & set(path.parts) and path.suffix != ".pyc"}


def keep(used: Mapping[str, set[str]], file: Path = FILE) -> None:
    """Writes what was recorded; of test files that did not run, what was known before, while they are there."""
    before = recorded(file) if file.exists() else {}
    merged = {name: files for name, files in (before | dict(used)).items() if (ROOT / name).exists()}
    names = sorted(set().union(*merged.values()))
    numbers = {name: number for number, name in enumerate(names)}
    rows = {name: _runs(sorted(numbers[used] for used in files)) for name, files in sorted(merged.items())}
    file.write_text(json.dumps({"files": names, "tests": rows}, indent=0) + "\n")


def recorded(file: Path = FILE) -> dict[str, set[str]]:
    """The files that each file of tests uses."""
    kept = json.loads(file.read_text())
    names = kept["files"]
    return {name: {names[number] for number in _numbers(runs)} for name, runs in kept["tests"].items()}


def _runs(numbers: list[int]) -> str:
    """`3-5,9` for 3, 4, 5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numbers(runs: str) -> Iterator[int]:
    for run in filter(None, runs.split(",")):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
