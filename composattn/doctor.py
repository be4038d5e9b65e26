"""What works on this machine: versions, GPUs, and for each backend whether it serves here."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

import torch

import composattn as ca
from composattn.backends.fused.compiling import disk_cache, toolchain
from composattn.watched import LOG

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "sympy", "numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "attn-gym")


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


def full() -> int:
    """Run the tests and benchmarks of this GPU's kernels, hours perhaps, and say what to send back."""
    if not (ROOT / "benchmarks" / "gpu_report.py").is_file():
        print(
            "the tests and benchmarks live in the source tree, not in the installed package: clone composattn "
            f"{ca.__version__}, pip install -e '.[gpu,test]' there, and run python -m composattn doctor --full in it"
        )
        return 2
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("benchmarks.gpu_report").report()  # type: ignore[no-any-return]
