"""Messages about what is not installed name commands that work."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from composattn.errors import MissingDependency
from composattn.extras import how_to_install

ROOT = Path(__file__).parents[2]


def test_an_installed_package_names_what_its_extra_has(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2.11", 'a[b]==1.2; extra == "gpu"', "c<3 ; extra == 'gpu'", 'd; extra == "plot"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert how_to_install("gpu") == "pip install 'a[b]==1.2' 'c<3'"
    assert how_to_install("plot") == "pip install 'd'"


def test_a_tree_that_is_not_installed_names_its_own_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_found)
    assert how_to_install("gpu") == f"pip install -e '{ROOT}[gpu]'"


def test_the_extras_that_messages_name_are_there() -> None:
    """By the text of the project file: each is a list of packages, none of which is composattn's own name."""
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    sources = "".join(path.read_text() for path in (ROOT / "composattn").rglob("*.py"))
    named = set(re.findall(r"how_to_install\([\"'](\w+)[\"']\)", sources))
    assert named == {"gpu", "transformers", "diffusers"}
    for extra in named:
        packages = re.search(rf"^{extra} = \[(.*)\]$", extras, re.MULTILINE)
        assert packages is not None and "composattn" not in packages[1], extra


def test_strategies_say_that_they_need_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "composattn.testing.strategies", raising=False)
    with pytest.raises(MissingDependency, match="pip install hypothesis"):
        importlib.import_module("composattn.testing.strategies")


def test_no_message_and_no_page_asks_an_index_for_composattn() -> None:
    """No index has it: `pip install composattn` fails, or installs what somebody else put there."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*.py")]
    files = [*pages, *(ROOT / "composattn").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    asks = re.compile(r"pip install\s+(?:-[-\w]+\s+)*['\"]?composattn\b")
    assert [path.name for path in files if path != Path(__file__) and asks.search(path.read_text())] == []
