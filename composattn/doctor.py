"""What works on this machine (`doctor`), and all of it tried on its GPU, to be sent back (`doctor --full`)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

import composattn as ca
from composattn.backends.fused.compiling import disk_cache, toolchain
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.target import TARGETS
from composattn.watched import LOG

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "sympy", "numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "attn-gym")
NEEDED = {"cutlass": "extra: gpu", "pytest": "extra: test", "hypothesis": "extra: test"}  # for all of it


def doctor() -> int:
    """Print versions, GPUs, what kernels are kept by, and for each backend whether it serves here or why not."""
    print(f"composattn {ca.__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} not installed")
    if not torch.cuda.is_available():
        print("no GPU")
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        capability = f"compute capability {facts.major}.{facts.minor}"
        print(f"GPU {number}: {facts.name}, {capability}, {facts.multi_processor_count} SMs")
    print(f"kernels are kept in {disk_cache.folder()}")
    by = f"sources {toolchain.source_hash()[:16]}, processor {toolchain.processor()[:24]}"
    print(f"  by {by}, {toolchain.compiler()}")
    for backend in ca.backends.BACKENDS:
        LOG.info("a tiny call by %s", backend)
        print(f"backend {backend}: {serves(backend)}")
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"calls on {here} that name no backend take {ca.backends.asked(None) or ca.backends.default_for(here)}")
    return 0


def serves(backend: str) -> str:
    """What a tiny call on this backend says: its error against fp64, or why it refuses."""
    generator = torch.Generator().manual_seed(0)
    eager = backend in ("reference", "streaming")
    gpu = torch.cuda.is_available() and not eager and not backend.endswith("-emulated")
    dtype = torch.float32 if eager else torch.bfloat16
    q, k, v = (torch.randn(1, 1, 128, 64, generator=generator).to("cuda" if gpu else "cpu", dtype) for _ in range(3))
    why = ca.backends.BACKENDS[backend].unavailable(q.device)
    if why is not None:
        return f"no: {why}"
    try:
        out, _ = ca.attention(q, k, v, return_lse=True, backend=backend)
    except ca.errors.ComposattnError as refusal:
        return f"no: {refusal}"
    except Exception as failure:  # a toolchain that is broken on this machine is what a doctor is asked about
        return f"broken: {type(failure).__name__}: {failure}"
    truth = torch.softmax(q.double() @ k.double().mT / 8.0, dim=-1) @ v.double()
    return f"yes (largest error of a tiny {str(dtype)[6:]} call: {(out - truth).abs().max().item():.1e})"


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


def full() -> int:
    """Run the tests and benchmarks of this GPU's kernels, hours perhaps, and say what to send back."""
    if not (ROOT / "tests" / "gpu").is_dir():
        print(
            "the tests and benchmarks live in the source tree, not in the installed package: clone composattn "
            f"{ca.__version__}, pip install -e '.[gpu,test]' there, and run python -m composattn doctor --full in it"
        )
        return 2
    missing = [f"{name} ({extra})" for name, extra in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}; pip install -e '.[gpu,test]' in {ROOT}")
        return 2
    report = Path.cwd() / f"composattn-report-{time.strftime('%Y%m%d-%H%M%S')}"
    picked = ca.backends.default_for(torch.device("cuda")) if torch.cuda.is_available() else None
    if picked not in ARCHITECTURES:
        doctor()
        known = ", ".join(f"{major}.{minor} ({t.gpu})" for (major, minor), t in TARGETS.items())
        print(f"\nno GPU here that kernels are generated for, so nothing was tried; on one ({known}) it runs")
        for step in steps(Path(report.name), has_backward=True):
            print(f"  {shlex.join(step.command)} > {report.name}/{step.file}")
        return 2
    report.mkdir()
    failed = tried(steps(report, ARCHITECTURES[picked].max_gradient_dim > 0), report)
    archive = shutil.make_archive(str(report), "gztar", report.parent, report.name)
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
