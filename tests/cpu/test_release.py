"""What a release says of itself is the same everywhere, and no address is made up."""

from __future__ import annotations

import re
from pathlib import Path

import composattn
from tests.matrix import PYTHONS

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))


def test_the_newest_version_has_a_date_and_is_the_same_everywhere() -> None:
    version, date = re.search(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
    cited = (ROOT / "CITATION.cff").read_text()
    assert version == composattn.__version__
    assert f"\nversion: {version}\n" in cited and f"\ndate-released: {date}\n" in cited


def test_the_pythons_that_are_named_are_those_that_the_matrix_runs() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(named) == PYTHONS


def test_no_page_for_users_names_a_host_or_an_address() -> None:
    assert len(TEMPLATES) >= 4
    files = [*TEMPLATES, ROOT / "SECURITY.md", ROOT / "CITATION.cff", ROOT / "pyproject.toml"]
    assert {file.name for file in files if re.search(r"https?://|\w@\w", file.read_text())} == set()


def test_each_template_has_what_lists_of_templates_show() -> None:
    for file in TEMPLATES:
        _, head, body = file.read_text().split("---\n", 2)
        assert re.findall(r"^(\w+): \S", head, re.M) == ["name", "about", "labels"], file.name
        assert body.strip(), file.name
