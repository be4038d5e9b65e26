"""The look at the site in a browser finds what is wrong with a page, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import browser

PROGRAM = browser.browser()
PAGE = "<!doctype html><body style='margin: 0'><article>" + "Words that fill the page. " * 10 + "{}</article>"
WRONG = {
    "no picture at": "<img src='gone.png'>",
    "scrolls sideways, 2000 wide": "<div style='width: 2000px; height: 1px'></div>",
    "fetches http://localhost": "<script src='http://localhost:1/lost.js'></script>",
}


@pytest.mark.skipif(PROGRAM is None, reason=f"none of {', '.join(browser.BROWSERS)} is here")
def test_each_wrong_page_is_named(tmp_path: Path) -> None:
    pages = {"good": "", **{f"bad{n}": body for n, body in enumerate(WRONG.values())}}
    for name, body in pages.items():
        (tmp_path / f"{name}.html").write_text(PAGE.format(body))
    assert PROGRAM is not None
    found = browser.problems(tmp_path, PROGRAM)
    expected = [(f"bad{n}.html, {width} wide", what) for n, what in enumerate(WRONG) for width in browser.WIDTHS]
    assert len(found) == len(expected)
    for line, (page, what) in zip(found, expected, strict=True):
        assert line.startswith(page) and what in line


def test_a_folder_without_pages_is_a_problem(tmp_path: Path) -> None:
    assert browser.problems(tmp_path / "nowhere", "chromium") == [f"there is no page in {tmp_path / 'nowhere'}"]


def test_a_browser_that_does_not_run_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE)
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    assert browser.problems(tmp_path, str(program)) == ["the browser ended by itself, exit status 7"]
