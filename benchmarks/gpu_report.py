"""All of composattn tried on this machine's GPU, to be sent back: what `python -m composattn doctor --full` runs."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

import composattn as ca
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.target import TARGETS
from composattn.doctor import doctor

ROOT = Path(__file__).parents[1]
NEEDED = {"cutlass": "extra: gpu", "pytest": "extra: test", "hypothesis": "extra: test"}  # for all of it


class Check(NamedTuple):
    """One thing that is tried: what it writes into the report, and the command."""

    file: str
    command: tuple[str, ...]


def steps(report: Path, has_backward: bool) -> list[Check]:
    """All that is tried on a GPU; without a backward, of the benchmarks what needs none."""
    python = sys.executable
    tests = (python, "-m", "pytest", "tests/gpu", "-m", "not nightly", "-p", "no:cacheprovider")
    speed = (python, "benchmarks/run.py", "--set", "forward", "mods", "gqa", "decode", "decode grid", "graph", "host")
    directions = () if has_backward else ("--only", "^(?!backward)")
    return [
        Check("doctor.txt", (python, "-m", "composattn", "doctor")),
        Check("tests.txt", tests),
        Check("speed.txt", (*speed, *directions, "--out", str(report / "speed.json"))),
    ]


def report() -> int:
    """Runs all of it, hours perhaps, and says what to send back."""
    missing = [f"{name} ({extra})" for name, extra in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}; pip install -e '.[gpu,test]' in {ROOT}")
        return 2
    folder = Path.cwd() / f"composattn-report-{time.strftime('%Y%m%d-%H%M%S')}"
    picked = ca.backends.default_for(torch.device("cuda")) if torch.cuda.is_available() else None
    if picked not in ARCHITECTURES:
        doctor()
        known = ", ".join(f"{major}.{minor} ({t.gpu})" for (major, minor), t in TARGETS.items())
        print(f"\nno GPU here that kernels are generated for, so nothing was tried; on one ({known}) it runs")
        for step in steps(Path(folder.name), has_backward=True):
            print(f"  {shlex.join(step.command)} > {folder.name}/{step.file}")
        return 2
    folder.mkdir()
    failed = tried(steps(folder, ARCHITECTURES[picked].max_gradient_dim > 0), folder)
    archive = shutil.make_archive(str(folder), "gztar", folder.parent, folder.name)
    print(f"\n{'all passed' if not failed else 'to look at: ' + ', '.join(failed)}")
    print(f"please send back {archive}: versions and folders of this machine, what the tests said, and speeds")
    return 1 if failed else 0


def tried(checks: list[Check], report: Path) -> list[str]:
    """Runs one after the other, and says which; in the report how each ended. The files of those that found a fault."""
    failed, began = [], time.monotonic()
    for number, check in enumerate(checks, 1):
        start = time.monotonic()
        print(f"\n--- {number} of {len(checks)}, after {start - began:.0f} s: {shlex.join(check.command)}", flush=True)
        passed = kept(check, report)
        failed += [] if passed else [check.file]
        with (report / "summary.txt").open("a") as summary:
            ended = "passed" if passed else "to look at"
            summary.write(f"{check.file}: {ended}, {time.monotonic() - start:.0f} s\n")
    return failed


def kept(step: Check, report: Path) -> bool:
    """Runs it in the source tree, its output on the screen and in the report; whether it found nothing wrong."""
    drawn = {"COMPOSATTN_FUZZ": "60", **os.environ}
    said = subprocess.Popen(
        step.command, cwd=ROOT, env=drawn, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    with (report / step.file).open("w") as file, said as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            file.write(line)
    return run.returncode == 0
