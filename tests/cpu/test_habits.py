"""What CONTRIBUTING, the changelog and the configuration say is true of the tree."""

from __future__ import annotations

import re

import pytest

import composattn
from tests.rooms import ROOT

PAGES = (
    "CONTRIBUTING.md",
    "README.md",
    "CHANGELOG.md",
    "docs/torch.md",
    "docs/emulator.md",
    "docs/design.md",
    "docs/blackwell.md",
    "docs/coming_from.md",
    "docs/how_it_works.md",
    "docs/integrations.md",
    "docs/more.md",
    "docs/searches.md",
    "docs/tutorial.md",
    "docs/vllm.md",
)
FOLDERS = ("composattn", "tests", "docs", "benchmarks", "recipes", ".ci")


def files_named(page: str) -> list[str]:
    """Paths in backticks, and targets of links within the repository."""
    text = (ROOT / page).read_text()
    quoted = re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*)`", text)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", text)
    return [*quoted, *(str(((ROOT / page).parent / link).resolve().relative_to(ROOT)) for link in links)]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_pages_name_are_there(page: str) -> None:
    named = files_named(page)
    assert [name for name in named if not (ROOT / name).exists()] == []


def module_or_name_exists(dotted: str) -> bool:
    """A module of the package, or a name that stands in one."""
    path, name = ROOT.joinpath(*dotted.split(".")), dotted.rpartition(".")[2]
    owner = path.parent.with_suffix(".py") if path.parent.with_suffix(".py").exists() else path.parent / "__init__.py"
    return path.is_dir() or path.with_suffix(".py").exists() or (owner.exists() and name in owner.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # which names what moved
def test_modules_that_pages_name_are_there(page: str) -> None:
    named = re.findall(r"(?<![\w/])composattn(?:\.[A-Za-z_]+)+", (ROOT / page).read_text())
    assert [name for name in named if not module_or_name_exists(name)] == []


def test_contributing_names_what_a_new_piece_touches() -> None:
    assert len(set(files_named("CONTRIBUTING.md"))) > 25


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest.group(1) == composattn.__version__


def test_the_version_stands_in_one_file() -> None:
    written = re.compile(rf"""version.{{0,5}}=\s*["']{re.escape(composattn.__version__)}["']""")
    sources = [*ROOT.glob("*.toml"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
    having = [str(path.relative_to(ROOT)) for path in sources if written.search(path.read_text())]
    assert having == ["composattn/__init__.py"]


def test_type_checking_leaves_out_no_file() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    settings = text.partition("[tool.mypy]")[2]
    checked = re.search(r"^files = (\[.*?\])", settings, re.MULTILINE | re.DOTALL)
    assert checked is not None
    assert all(f'"{folder}"' in checked.group(1) for folder in ("composattn", "benchmarks", "tests", "recipes", "docs"))
    assert "ignore_errors" not in settings and "exclude" not in settings
    for listed in re.findall(r"disable_error_code = \[(.*?)\]", settings, re.DOTALL):
        kept = ("attr-defined", "name-defined", "assignment", "import-not-found")
        assert [code for code in kept if f'"{code}"' in listed] == []


def test_only_files_of_the_kernel_language_are_checked_for_less() -> None:
    settings = (ROOT / "pyproject.toml").read_text().partition("[tool.mypy]")[2]
    overrides = re.findall(r"^module = \[(.*?)\]", settings, re.MULTILINE | re.DOTALL)
    named = {name for listed in overrides for name in re.findall(r'"(composattn[\w.*]*)"', listed)}
    assert len(named) > 50
    sources = {name: ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in named}
    assert [name for name, path in sources.items() if not path.exists()] == []
    device = re.compile(r"^(?:import|from) cutlass\b", re.MULTILINE)
    assert [name for name, path in sources.items() if not device.search(path.read_text())] == []
