"""What `make wheel` built is whole, and works in an environment that has never seen this folder.

`python -m tests.wheel dist`, after `python -m build --outdir dist`. A new environment gets the wheel, by pip, and
nothing else of ours. torch and what else the wheel requires is lent to it from the environment that runs this, by a
path in a .pth file: installing torch again would take minutes and show nothing of the wheel. pip itself says whether
the requirements are met. The recipe that `make demo` runs is copied to a folder outside of the tree and run there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO = ("01_quickstart.py", "common.py")
BESIDE = {"pyproject.toml", "README.md", "LICENSE"}
MADE = {"PKG-INFO", "setup.cfg"}
"""What setuptools adds to a source distribution, besides the .egg-info."""


class NotWhole(Exception):
    """A distribution lacks files of the tree, has others, or does not work where it is installed."""


def sources(root: Path = ROOT) -> set[str]:
    """The files of the package in the tree, by their path from `root`."""
    files = (path for path in (root / "composattn").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix() for path in files}


def packed(distribution: Path) -> set[str]:
    """The files of a wheel or of a source distribution that came from the tree."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as archive:
            return {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(distribution) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return {name for name in names - MADE if ".egg-info/" not in name}


def check_contents(distribution: Path, wanted: set[str]) -> None:
    found = packed(distribution)
    if found != wanted:
        missing, strange = sorted(wanted - found), sorted(found - wanted)
        raise NotWhole(f"{distribution.name}: missing {missing[:5]}, not of the tree {strange[:5]}")


def run(*command: str | Path, folder: Path) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=plain, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise NotWhole(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def environment_with(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel, and by a path what this one has; returns its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--no-index")
    run(*pip, "--no-deps", wheel, folder=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
    # .pth files of a folder that one of them names are not read: an editable install there stays out of sight
    (Path(site) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*pip, "composattn", folder=folder)  # installs nothing, and fails where a requirement of the wheel is not met
    return python


def check_installed(wheel: Path, folder: Path) -> None:
    """The version, where the package is found, the command line and the demo, all away from the tree."""
    python = environment_with(wheel, folder / "environment")
    away = folder / "away"
    away.mkdir()
    found, version = run(
        python, "-c", "import composattn as ca; print(ca.__file__, ca.__version__)", folder=away
    ).split()
    if not Path(found).is_relative_to(folder / "environment"):
        raise NotWhole(f"composattn was imported from {found}, not from the new environment")
    said = run(python.with_name("composattn"), "--version", folder=away)
    if said != f"composattn {version}" or f"-{version}-" not in wheel.name:
        raise NotWhole(f"{wheel.name} holds version {version}, and its command says {said!r}")
    for name in DEMO:
        shutil.copy(ROOT / "recipes" / name, away)
    print(run(python, DEMO[0], folder=away).splitlines()[-1])


def main(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    check_contents(wheel, sources())
    check_contents(source, sources() | BESIDE)
    with tempfile.TemporaryDirectory() as folder:
        check_installed(wheel.resolve(), Path(folder).resolve())
    print(f"{wheel.name}: {len(sources())} files, works in an environment of its own")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
