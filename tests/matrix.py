"""composattn with each Python and torch that it takes: a new environment of each pair, and what some tests say there.

`python -m tests.matrix [--only 3.11] [--folder environments]` writes `tests/matrix.json`. An environment has composattn
without extras, so it also says whether tests that need one are left out by name. A pair whose interpreter or whose
torch is not to be had has a row that says so. Each takes some gigabytes, and is removed before the next one is made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "tests" / "matrix.json"
PYTHONS = ("3.10", "3.11", "3.13")
TORCHES = ("2.11.0", "2.13.0", "2.15.0")
TOOLS = ("pytest>=8", "hypothesis>=6.100", "expecttest>=0.3")
TESTS = (
    "test_versions_of_torch.py", "test_one_reading.py", "test_torch_integration.py", "test_flex.py", "test_nn.py",
    "test_transforms.py", "test_moved_modules.py", "test_recipes.py",
)  # fmt: skip
"""Of tests/cpu: what Python and torch decide (the code of mods, Dynamo, autograd), and what a newcomer runs."""

Row = dict[str, object]


def output(*command: str | Path) -> str:
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def interpreter(version: str) -> str | None:
    """The Python of this version on PATH, if it starts: what manages versions may leave names that lead nowhere."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    try:
        return output(found, "-c", "import sys; print(sys.executable)")
    except subprocess.CalledProcessError:
        return None


def counted(report: Path) -> Row:
    """Tests by outcome, the names of those that failed, and why others were left out, with their number."""
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skipped is not None:
            outcomes["expected to fail" if skipped.get("type") == "pytest.xfail" else "skipped"] += 1
            reasons[(skipped.get("message") or "").partition(":")[0]] += 1
        else:
            outcomes["passed"] += 1
    return {**outcomes, "left out": dict(reasons), "that failed": failed}


def row(python: str, torch: str, folder: Path) -> Row:
    """One pair: installed, imported, tested."""
    said: Row = {"python": python, "torch": torch}
    command = interpreter(python)
    if command is None:
        return said | {"not run": f"no interpreter of Python {python}"}
    environment = folder / f"{python}-{torch}"
    bare = environment / "bin" / "python"
    try:
        output(command, "-m", "venv", "--clear", environment)
        try:
            output(bare, "-m", "pip", "install", "--quiet", f"torch=={torch}", "numpy")
        except subprocess.CalledProcessError as error:
            if "No matching distribution" not in error.stderr:
                raise
            return said | {"not run": f"no wheel of torch {torch} for Python {python}"}
        output(bare, "-m", "pip", "install", "--quiet", "-e", ROOT, *TOOLS)
        said["python"], said["torch"] = output(
            bare, "-c", "import platform, torch, composattn; print(platform.python_version(), torch.__version__)"
        ).split()
        report = folder / "report.xml"
        files = [f"tests/cpu/{name}" for name in TESTS]
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
        ended = subprocess.run([str(bare), "-m", "pytest", *options, *files], cwd=ROOT, check=False).returncode
        if ended > 1:
            raise RuntimeError(f"pytest ended with {ended}: the tests did not run")
        return said | counted(report)
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="pairs with this in 'PYTHON TORCH'; rows of others stay as they are")
    parser.add_argument("--folder", type=Path, help="where environments are made; default: a temporary one")
    options = parser.parse_args()
    kept: dict[str, Row] = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for pair in (f"{python} {torch}" for python in PYTHONS for torch in TORCHES):
            if options.only not in pair:
                continue
            print(f"=== Python and torch {pair}", flush=True)
            kept[pair] = {**row(*pair.split(), Path(folder)), "commit": output("git", "rev-parse", "HEAD")}
            print(kept[pair], flush=True)
            result = {"tests": TESTS, "rows": kept}
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(said.get("failed") for said in kept.values()))


if __name__ == "__main__":
    raise SystemExit(main())
