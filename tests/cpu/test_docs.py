"""Every Python example of the README and of the pages runs, and pictures and pages are what their scripts make.

The blocks of a page run in order in one namespace, as a reader pastes them: what a page shows is all there is.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import composattn
from tests.support import docs_script, has_kernel_toolchain

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS_KERNELS = {"docs/emulator.md"}  # compiled: half a minute
NEEDS_TRANSFORMERS = {"docs/integrations.md"}


def blocks(page: Path) -> list[str]:
    """The examples of a page, each behind as many empty lines as put an error at its line of the page."""
    text = page.read_text()
    return ["\n" * text[: found.start(1)].count("\n") + found[1] for found in BLOCK.finditer(text)]


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(page)]


def params() -> list[Any]:
    names = [page.relative_to(ROOT).as_posix() for page in PAGES]
    return [pytest.param(name, marks=[pytest.mark.slow] if name in NEEDS_KERNELS else []) for name in names]


def test_pages_with_examples_are_found() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "docs/tutorial.md", "docs/coming_from.md", "docs/mods.md"} <= names


@pytest.mark.parametrize("name", params())
def test_examples_run(name: str, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS_KERNELS and not has_kernel_toolchain():
        pytest.skip("nvidia-cutlass-dsl is not installed (extra: gpu)")
    if name in NEEDS_TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (extra: transformers)")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(ROOT / name):
        exec(compile(block, str(ROOT / name), "exec"), namespace)


@pytest.mark.slow
@pytest.mark.parametrize("name", params())
def test_examples_run_when_pasted_into_a_file(name: str, tmp_path: Path) -> None:
    """In a process of its own, beside no clone: nothing that another page or this one's tests imported is there."""
    if (name in NEEDS_KERNELS and not has_kernel_toolchain()) or (
        name in NEEDS_TRANSFORMERS and importlib.util.find_spec("transformers") is None
    ):
        pytest.skip("an extra is not installed")
    (tmp_path / "pasted.py").write_text("\n".join(block.lstrip("\n") for block in blocks(ROOT / name)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_page_needs_is_on_the_page() -> None:
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    assert [page.name for page in pages if "<!-- python" in page.read_text()] == []


def test_no_example_is_left_out_by_how_it_is_written() -> None:
    unseen = re.compile(r"^(?:[ \t]+```|~~~|```(?!python$)(?:[pP]y|\{)).*", re.MULTILINE)
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    found = {page.name: unseen.findall(page.read_text()) for page in pages}
    assert {name: lines for name, lines in found.items() if lines} == {}, "begin with ```python, in the first column"


READ_BY_USERS = (
    "README", "docs/tutorial", "docs/coming_from", "docs/faq", "docs/slow", "docs/decoding", "docs/torch",
    "docs/watching", "docs/eight_bits", "docs/more", "docs/settings", "docs/integrations", "docs/vllm",
    "docs/flex_conformance", "docs/gpus",
)  # fmt: skip


@pytest.mark.parametrize("name", READ_BY_USERS)
def test_code_is_no_wider_than_the_site_shows(name: str) -> None:
    fences = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [line for block in fences for line in block.splitlines() if len(line) > 96] == []


def test_links_between_pages_lead_to_pages_of_the_site() -> None:
    site = docs_script("site_links")
    pages = {name: page for name, page in site.places().items() if name.endswith(".md")}
    assert len(pages) > 15
    for name, page in pages.items():
        site.links_turned((ROOT / name).read_text(), name, page)  # raises where there is none
    assert site.links_turned("[a](mods.md#alibi) `x`", "docs/more.md", "more.md") == "[a](mods.md#alibi) `x`"
    assert site.links_turned("[a](../README.md)", "docs/more.md", "more.md") == "[a](index.md)"
    assert site.links_turned("[docs/slow.md](docs/slow.md)", "README.md", "index.md") == (
        "[My mask is slow, what now](slow.md)"
    )
    with pytest.raises(site.UnknownPage):
        site.links_turned("[a](../benchmarks/results/h200-host.json)", "docs/more.md", "more.md")


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    # the site itself is built at night
    listed = set(re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages | {
        "index.md",
        "findings.md",
        "log/2026-11.md",
        "changelog.md",
        "contributing.md",
        "security.md",
        "recipes/index.md",
    }


def test_what_the_reference_names_is_there() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    assert {"composattn.attention", "composattn.Varlen", "composattn.errors"} <= set(named)
    for name in named:
        module = ROOT / f"{name.replace('.', '/')}.py"
        if module.exists():  # not imported: it may need what is not here
            assert ast.get_docstring(ast.parse(module.read_text())), name
        else:
            assert pkgutil.resolve_name(name).__doc__, name
    elsewhere = {"composattn.mods", "composattn.backends", "composattn.nn"}  # a page, and what is named of them
    inside = {"composattn.ComposattnError"}  # of composattn.errors
    assert {f"composattn.{name}" for name in composattn.__all__} <= {*named, *elsewhere, *inside}


def test_the_gallery_is_current() -> None:
    script = docs_script("make_gallery")
    for path, text in {script.PAGE: script.page(), **script.pictures()}.items():
        assert path.read_text() == text, f"{path.name}: run python docs/make_gallery.py"
    assert {path.name for path in script.PICTURES.iterdir()} == {path.name for path in script.pictures()}


def test_the_pictures_of_the_stages_are_current() -> None:
    script = docs_script("make_stages")
    for path, text in script.pictures().items():
        assert path.read_text() == text, f"{path.name}: run python docs/make_stages.py"
