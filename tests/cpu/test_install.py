"""Installed from its source tree, the package is found wherever a user's script lies, beside the clone too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import composattn as ca
from tests import wheel

ROOT = Path(__file__).parents[2]


def run(*arguments: str, folder: Path) -> str:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clone in it, and `site`, where an editable install was put as pip puts it."""
    parent = tmp_path_factory.mktemp("parent")
    clone = parent / "composattn"
    shutil.copytree(ROOT / "composattn", clone / "composattn")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = f"import setuptools.build_meta as b; b.build_editable({str(parent)!r})"
    run("-c", build, folder=clone)
    (wheel,) = parent.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(parent / "site")
    return parent


# As site does at the start of Python, without checkouts that are installed in this environment, this one among them
ALONE = (
    "import site, sys; from pathlib import Path;"
    "sys.path = [p for p in sys.path if not (Path(p or '.', 'composattn') / '__init__.py').exists()];"
    "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)];"
)


def test_a_script_beside_the_clone_finds_the_package(parent: Path) -> None:
    (parent / "my.py").write_text(
        f"{ALONE} site.addsitedir(sys.argv[1]);"
        "import composattn; print(composattn.__file__, composattn.attention.__name__)"
    )
    found = parent / "composattn" / "composattn" / "__init__.py"
    assert run("my.py", str(parent / "site"), folder=parent) == f"{found} attention"


def test_the_command_line_works_beside_the_clone(parent: Path) -> None:
    code = (
        f"{ALONE} import runpy; site.addsitedir({str(parent / 'site')!r}); sys.argv = ['composattn', '--version'];"
        "runpy.run_module('composattn', run_name='__main__')"
    )
    assert run("-c", code, folder=parent) == f"composattn {ca.__version__}"


def test_the_installed_version_is_that_of_the_package(parent: Path) -> None:
    (metadata,) = (parent / "site").glob("*.dist-info/METADATA")
    assert f"\nVersion: {ca.__version__}\n" in metadata.read_text()


@pytest.mark.parametrize("wrong", ["a file is missing", "a file is not of the tree"])
def test_a_wheel_that_is_not_whole_is_refused(wrong: str, tmp_path: Path) -> None:
    names = wheel.sources() - {"composattn/py.typed"} if "missing" in wrong else wheel.sources() | {"composattn/old.py"}
    built = tmp_path / "composattn-1-py3-none-any.whl"
    with zipfile.ZipFile(built, "w") as archive:
        for name in (*names, "composattn-1.dist-info/METADATA"):
            archive.writestr(name, "")
    with pytest.raises(wheel.NotWhole, match=r"py\.typed" if "missing" in wrong else r"old\.py"):
        wheel.check_contents(built, wheel.sources())
