"""Where a result comes from: machine, versions, commit and command, so that it can be run again."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("nvidia-cutlass-dsl", "flash-attn-4", "nvidia-cudnn-frontend", "triton", "apache-tvm-ffi", "numpy", "sympy")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine(device: torch.device) -> str:
    """The processor that ran the rows, in words."""
    if device.type != "cuda":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    memory = properties.total_memory / 2**30
    return (
        f"one {properties.name}, {properties.multi_processor_count} SMs, {memory:.0f} GiB, driver {driver or 'unknown'}"
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit, marked when the tree differs from it; COMPOSATTN_COMMIT says it where there is no repository."""
    told = os.environ.get("COMPOSATTN_COMMIT")
    if told:
        return told
    head = _output("git", "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", "composattn", "benchmarks")
    return head + ("+changes" if changed else "")


def command() -> str:
    """How Python was called."""
    module = sys.modules["__main__"].__spec__
    program = f"-m {module.name.removesuffix('.__main__')}" if module else f"benchmarks/{Path(sys.argv[0]).name}"
    return " ".join(["python", program, *sys.argv[1:]])


def provenance(device: torch.device) -> dict[str, object]:
    """Everything of a result file but its rows."""
    return {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
