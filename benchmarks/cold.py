"""What a new process waits for: imports, the first forward, the first backward; with nothing compiled, and from disk.

Every sample is a process of its own. Seconds of the wall: `torch` and `import` are the two imports, `inputs` until q, k
and v lie on the device (which on a GPU begins the CUDA context), `forward` and `backward` the first call of each until
the device is done. A sample of "nothing warm" begins with an empty disk cache, one of "kernels on disk" with what such
a process left. Beside the walls of the two calls the seconds of CPUs: fewer where a process waited for files, or was
not let run. FlexAttention beside: torch.compile with an empty cache of its own, and with a filled one.

composattn and the kernel language are as pip leaves them, with bytecode, which is written before the first sample where
an installer left it out: to compile the language's sources took 1.5 s of each sample that found none.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import ROOT, provenance

PARTS = ("torch", "import", "inputs", "forward", "backward")
ON_CPUS = ("forward_cpu", "backward_cpu")
NOTHING, ON_DISK = "nothing warm", "kernels on disk"


@dataclass(frozen=True)
class Case:
    """The options of a call as Python, ours and FlexAttention's; they may read ids (of documents), slopes and S."""

    name: str
    ours: str
    flex: str


CASES = (
    Case(
        "causal",
        "mask_mod=causal()",
        "block_mask=create_block_mask(lambda b, h, q, kv: q >= kv, None, None, S, S, device)",
    ),
    Case(
        "documents, alibi",
        "mask_mod=causal() & document(ids), score_mod=alibi(slopes)",
        "block_mask=create_block_mask(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, S, S, device), "
        "score_mod=lambda s, b, h, q, kv: s + slopes[h] * (kv - q)",
    ),
)

CALLED = {
    "composattn": ("import composattn as ca\nfrom composattn.mods import *\ncall = ca.attention", "ours"),
    "FlexAttention": (
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
        "call = torch.compile(flex_attention)",
        "flex",
    ),
}

PROCESS = """
import json, os, sys, time
marks, cpus = [time.perf_counter()], [0.0]
def mark():
    marks.append(time.perf_counter())
    cpus.append(sum(os.times()[:4]))
import torch
mark()
{imports}
mark()
device, S = "{device}", {length}
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q, k, v, dout = (torch.randn(1, {heads}, S, {dim}, device=device, dtype=dtype) for _ in range(4))
ids, slopes = torch.arange(S, device=device) // 700, 2.0 ** -torch.arange(1.0, {heads} + 1, device=device)
leaves = [t.requires_grad_() for t in (q, k, v)]
wait(); mark()
out = call(*leaves, {options})
wait(); mark()
(out * dout).sum().backward()  # out.backward(dout) would import sympy, by torch itself: 0.4 s
wait(); mark()
print(json.dumps([b - a for a, b in [*zip(marks, marks[1:]), *list(zip(cpus, cpus[1:]))[-2:]]]))
"""


@dataclass(frozen=True)
class Size:
    heads: int = 16
    length: int = 4096
    dim: int = 128


def sample(case: Case, implementation: str, size: Size, device: str, cache: Path) -> dict[str, float]:
    """Seconds of each of `PARTS` and `ON_CPUS`, of a new process that keeps what it compiles in `cache`."""
    imports, spelled = CALLED[implementation]
    options = getattr(case, spelled)
    code = PROCESS.format(
        imports=imports, device=device, length=size.length, heads=size.heads, dim=size.dim, options=options
    )
    kept = {"COMPOSATTN_CACHE_DIR": "ours", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    folders = {name: str(cache / folder) for name, folder in kept.items()}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **folders, **path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{implementation}, {case.name}: {done.stderr.strip().splitlines()[-1]}")
    return dict(zip(PARTS + ON_CPUS, json.loads(done.stdout.splitlines()[-1]), strict=True))


def write_bytecode() -> None:
    """The bytecode of composattn, the kernel language and what it calls kernels with, as `pip install` writes it."""
    for package in ("cutlass", "tvm_ffi", "composattn"):
        found = importlib.util.find_spec(package)
        if found is not None:
            for folder in found.submodule_search_locations or ():
                compileall.compile_dir(folder, quiet=2, workers=0)


def measure(case: Case, implementation: str, size: Size, device: str, repeats: int) -> list[dict[str, Any]]:
    """Two rows: from nothing and from disk; medians, with all samples beside."""
    samples: dict[str, list[dict[str, float]]] = {NOTHING: [], ON_DISK: []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="composattn-cold-") as cache:
            for state in (NOTHING, ON_DISK):
                samples[state].append(sample(case, implementation, size, device, Path(cache)))
    return [
        {
            "row": f"{case.name}, {state}",
            "impl": implementation,
            **{f"{part}_s": statistics.median(s[part] for s in found) for part in PARTS + ON_CPUS},
            "samples": found,
        }
        for state, found in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flex", action="store_true", help="FlexAttention beside")
    parser.add_argument("--length", type=int, default=Size.length)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    write_bytecode()
    size, start = Size(length=options.length), time.monotonic()
    result: dict[str, Any] = {**provenance(torch.device(options.device)), "rows": []}
    for case in CASES:
        for implementation in CALLED if options.flex else ("composattn",):
            for row in measure(case, implementation, size, options.device, options.repeats):
                parts = "   ".join(f"{part} {row[f'{part}_s']:6.2f}" for part in PARTS + ON_CPUS)
                print(f"[{time.monotonic() - start:4.0f} s] {row['row']:36} {implementation:14} {parts}", flush=True)
                result["rows"].append(row)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
