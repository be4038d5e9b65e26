"""A docstring stands alone: who reads it has not read the one before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rooms import ROOT

FOLDERS = ("composattn", "tests", "benchmarks", "docs", "recipes")
GOES_ON = re.compile(
    r"(The same|Same|Of|As|Those|Likewise|Then|Else|Nor|Or|And|But|Also|So|Too|Such)\b|.{0,50}, (then|too|then too):"
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, docstring) of the module, its classes and its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_goes_on_where_another_one_ended(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if GOES_ON.match(text)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["The same of keys.", "As of `Mask`.", "Of the forward.", "`passing`, then too: no."])
def test_a_docstring_that_goes_on_is_found(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "example.py").write_text(f'def f():\n    """{text}"""\n')
    ((line, found),) = docstrings(path)
    assert line == 1 and GOES_ON.match(found)


@pytest.mark.parametrize("text", ["Offsets of a tile.", "Orders tiles.", "out (B, H, S, D), then lse.", "Sorts keys."])
def test_one_that_stands_alone_is_not(text: str) -> None:
    assert not GOES_ON.match(text)
