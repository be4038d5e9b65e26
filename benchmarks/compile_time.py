"""How long our kernels take to compile and flash-attn-4's of the same calls, each in a new process, by turns; no GPU.

    python -m benchmarks.compile_time --target sm_100a

Seconds of the wall and of CPUs from the call until the machine code is there, with imports left out and nothing kept
from before: the median of several, and the least. A busy machine shows in the wall alone, so its load stands beside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.model.clocks import TARGETS
from benchmarks.model.peer import PACKAGE, PeerCall, PeerMissing, seconds_to_compile, version

Seconds = tuple[float, float]  # of the wall, of CPUs
DIMS = (64, 128)
OURS = """
import sys, time
from pathlib import Path
from benchmarks.compile_time import case_of
from benchmarks.model.kernels import plan_of, target_of
from benchmarks.model.peer import _cpu
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.generated import kernel_of
import composattn.backends.fused.compiling.fake, torch
case = case_of({dim})
target = target_of("{arch}")
import composattn.backends.blackwell.forward, composattn.backends.hopper.forward
wall, cpu = time.perf_counter(), _cpu()
compile_offline(plan_of(case, case.pattern(case, torch.device("cpu")), target), Path("{folder}"))
print(time.perf_counter() - wall, _cpu() - cpu)
"""


def case_of(dim: int) -> Case:
    """A causal forward of long sequences."""
    return Case(f"D{dim} causal", (), cases.causal, 2, 16, 8192, dim, v_dim=dim)


def ours(dim: int, arch: str, folder: Path) -> Seconds:
    code = OURS.format(dim=dim, arch=arch, folder=folder)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall, cpu = map(float, done.stdout.split()[-2:])
    return wall, cpu


def theirs(dim: int, arch: str, folder: Path) -> Seconds:
    return seconds_to_compile(PeerCall(dim=dim, v_dim=dim, causal=True), arch, folder)


def measure(dim: int, arch: str, repeats: int) -> dict[str, list[Seconds]]:
    """Both by turns, so that what else the machine does is alike for both."""
    taken: dict[str, list[Seconds]] = {"composattn": [], PACKAGE: []}
    for _ in range(repeats):
        for who, compiled in (("composattn", ours), (PACKAGE, theirs)):
            with tempfile.TemporaryDirectory(prefix="composattn-") as folder:
                os.chmod(folder, 0o700)
                taken[who].append(compiled(dim, arch, Path(folder)))
    return taken


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_time", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", choices=sorted(TARGETS), default="sm_100a")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    try:
        version()
    except PeerMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    for dim in DIMS:
        print(f"D {dim} causal, {options.target}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        for who, taken in measure(dim, options.target, options.repeats).items():
            for unit, seconds in zip(("wall", "CPU"), zip(*taken, strict=True), strict=True):
                print(f"  {who:12}  {unit:4}  median {statistics.median(seconds):.2f} s, least {min(seconds):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
