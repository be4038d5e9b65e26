"""The page of the ready mods is what its script makes of the docstrings, and every docstring says what it must."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from composattn import mods
from tests.support import docs_script

DOCS = Path(__file__).parents[3] / "docs"


def script() -> Any:
    return docs_script("make_mods")


def test_page_is_current() -> None:
    assert (DOCS / "mods.md").read_text() == script().page(), "run: python docs/make_mods.py"


def test_every_mod_has_an_example() -> None:
    assert sorted(script().EXAMPLES) == sorted(mods.__all__)


@pytest.mark.parametrize("name", mods.__all__)
def test_docstring_has_formula_source_and_errors(name: str) -> None:
    text = inspect.getdoc(getattr(mods, name)) or ""
    assert "`" in text, "a formula"
    assert "Source: " in text
    assert "Raises: `InvalidModArgument`" in text
