"""What code and pages cite of the log of performance is there, each entry by an anchor of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rooms import ROOT

LOGS = sorted((ROOT / "benchmarks" / "log").glob("*.md"))
FINDINGS = ROOT / "benchmarks" / "findings.md"
SOURCES = ("composattn", "tests", "docs", "benchmarks", "recipes")


def anchors(page: Path) -> list[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings]


def cited() -> Iterator[tuple[str, str, str]]:
    """Where, the log's file, and the anchor, of each citation in the tree."""
    pages = [path for name in SOURCES for end in ("py", "md") for path in (ROOT / name).rglob(f"*.{end}")]
    for path in [*pages, *ROOT.glob("*.md")]:
        for name, anchor in re.findall(r"\blog/(\d{4}-\d\d\.md)(?:#([\w-]+))?", path.read_text()):
            yield str(path.relative_to(ROOT)), name, anchor
        if path.parent.name == "log":
            yield from ((path.name, path.name, anchor) for anchor in re.findall(r"\]\(#([\w-]+)\)", path.read_text()))


@pytest.mark.parametrize("page", [*LOGS, FINDINGS], ids=lambda page: page.name)
def test_no_two_entries_have_one_anchor(page: Path) -> None:
    found = anchors(page)
    assert len(found) == len(set(found))


def test_every_citation_of_the_log_names_an_entry_that_is_there() -> None:
    known = {(page.name, anchor) for page in LOGS for anchor in ["", *anchors(page)]}
    found = list(cited())
    assert len(found) > 200
    assert [citation for citation in found if citation[1:] not in known] == []


def test_code_cites_entries_and_not_the_whole_log() -> None:
    assert [where for where, _, anchor in cited() if where.startswith("composattn") and not anchor] == []


def test_a_finding_says_what_it_gave_whether_it_stands_and_which_entry_has_it_whole() -> None:
    rows = [line.strip("| ").split(" | ") for line in FINDINGS.read_text().splitlines() if "](log/" in line]
    rows = [row for row in rows if len(row) > 1]
    assert len(rows) > 150
    for idea, *_, stands, entry in rows:
        assert stands.startswith(("kept", "lost", "gone", "mended", "evidence", "nothing to do")), idea
        assert re.search(r"\(log/\d{4}-\d\d\.md#[\w-]+\) `[0-9a-f]{7}`$", entry), idea
