"""Which files of the tree the tests of each file use, as a run recorded: `python -m tests.reached [FILE...]`.

A file is used where a function of it ran, in whatever way it was imported, or where it was opened, as pages and results
are. Each file of tests runs in a process of its own with nothing cached: what an earlier one had planned or compiled
would not run again. The profiler is C code, and takes a quarter of a test's time.
"""

from __future__ import annotations

import builtins
import cProfile
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("reached.json")
IGNORED = {".git", ".venv", "__pycache__", ".pytest_cache", ".hypothesis", "build", "dist", "site"}

Used = dict[str, set[str]]  # files of the tree, by test file


class Recorder:
    """Collects what runs and what is read inside of `test`, for the file of tests that it is told."""

    def __init__(self) -> None:
        self.used: Used = {}

    @contextmanager
    def test(self, path: Path) -> Iterator[None]:
        """What runs inside belongs to a file of tests."""
        profiler = cProfile.Profile(builtins=False)
        try:
            with opened() as read:
                profiler.enable()
                yield
        finally:
            profiler.disable()
            codes = (entry.code for entry in profiler.getstats())
            # the body of a module runs with whichever test imports it first
            ran = {code.co_filename for code in codes if not isinstance(code, str) and code.co_name != "<module>"}
            self.used.setdefault(str(path.relative_to(ROOT)), set()).update(in_tree(read | ran))


@contextmanager
def opened() -> Iterator[set[str]]:
    """Which files `open` opens inside; an audit hook would be told of each `id()` as well."""
    given, found = builtins.open, set[str]()

    @functools.wraps(given)
    def told(file: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            found.add(os.fspath(file))
        return given(file, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", told)
        patch.setattr(io, "open", told)
        yield found


def in_tree(files: set[str]) -> set[str]:
    """The files that belong to the checkout, from its root."""
    whole = (os.path.abspath(name) for name in files)
    inside = (Path(name).relative_to(ROOT) for name in whole if name.startswith(f"{ROOT}/"))
    return {str(path) for path in inside if not IGNORED & set(path.parts) and path.suffix != ".pyc"}


def record(test: str) -> Used:
    """Runs a file of tests, and gives what it used; nothing where it has no test to run here."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "reached.json")
        fresh = os.environ | {"COMPOSATTN_CACHE_DIR": f"{folder}/cache"}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header", f"--record-reached={found}", test]
        done = subprocess.run(command, cwd=ROOT, env=fresh, check=False, capture_output=True, text=True)
        print(f"{test}: {done.stdout.strip().splitlines()[-1]}", flush=True)
        return recorded(found) if done.returncode == 0 else {}


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


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")):
        keep(record(name))
