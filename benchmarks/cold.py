"""What a new process waits for: imports, the first forward, the first backward; with nothing compiled, and from disk.

    python -m benchmarks.cold --flex --out result.json
    python -m benchmarks.cold --cases warp --empty --within 100 --out result.json
    python -m benchmarks.cold --cases warp --empty --only documents --only learned

Every sample is a process of its own. Seconds of the wall: `torch` and `import` are the two imports, `inputs` until q, k
and v lie on the device (which on a GPU begins the CUDA context), `forward` and `backward` the first call of each until
the device is done. `language`: what of `forward` is the import of the kernel language. A sample of "nothing warm"
begins with an empty disk cache, one of "kernels on disk" with what such a process left. Beside the walls of the two
calls the seconds of CPUs: fewer where a process waited for files, or was not let run; and the seconds of each kernel
that was compiled. Hosts differ by two, so there is a yardstick: `python`, two million steps of a loop before a process
imports anything. FlexAttention beside: torch.compile with an empty cache of its own, and with a filled one.

A round has one sample of each case. Its processes are forked, one after the other, from one that has imported torch and
nothing else, before anybody asked for a GPU, so that `torch` is the same in all of them.

composattn and the kernel language are as pip leaves them, with bytecode, which is written before the first sample where
an installer left it out: to compile the language's sources took 1.5 s of each sample that found none.
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import ROOT, provenance

PARTS = ("torch", "import", "inputs", "forward", "backward")
BESIDE = ("language", "forward_cpu", "backward_cpu", "python")
NOTHING, ON_DISK = "nothing warm", "kernels on disk"
Sample = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """The options of a call as Python, ours and FlexAttention's; they may read what `PROCESS` makes, and S.

    `flex` is "" where only ours is measured.
    """

    name: str
    ours: str
    flex: str = ""
    dim: int = 128


@dataclass(frozen=True)
class Size:
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    length: int = 4096


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
BY_WARPS = (
    Case("D 256 causal", 'mask_mod=causal(), backend="warp"', dim=256),
    Case("D 128 documents", 'mask_mod=causal() & document(ids), backend="warp"'),
    Case("D 128 learned bias", 'mask_mod=causal(), score_mod=learned, backend="warp"'),
    Case("D 128 causal ALiBi", 'mask_mod=causal(), score_mod=alibi(slopes), backend="warp"'),
    Case("D 128 causal", 'mask_mod=causal(), backend="warp"'),
    Case("D 192 causal", 'mask_mod=causal(), backend="warp"', dim=192),
    Case("D 64 causal", 'mask_mod=causal(), backend="warp"', dim=64),
)
SETS = {"chosen": (CASES, Size()), "warp": (BY_WARPS, Size(2, 16, 4, 8192))}
"""Cases by name, and of which size: by the kernels that a GPU gets, and by those of warps, on any."""

CALLED = {
    "composattn": (
        "import composattn as ca\nfrom composattn.mods import *\ncall = ca.attention",
        "from composattn.backends.fused.compiling.compile import uncollected\nwith uncollected(): import cutlass.cute",
    ),
    "FlexAttention": (
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
        "call = torch.compile(flex_attention)",
        "",
    ),
}
"""By who computes it: what a process imports, and how the kernel language is imported on a GPU."""

ROUND = """
import json, os, sys, time
start = time.perf_counter()
import torch
taken = time.perf_counter() - start
for line in sys.stdin:
    given = json.loads(line)
    if time.time() > given["until"]:
        break
    if not os.fork():
        os.environ.update(given["folders"])
        try:
            exec(compile(given["code"], "a new process", "exec"), {"torch_s": taken, "__name__": "__main__"})
        except BaseException as failed:
            print(json.dumps({"failed": f"{type(failed).__name__}: {failed}"}))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""

PROCESS = """
import json, logging, os, time
start, steps = time.perf_counter(), 0
for number in range(2_000_000):
    steps += number & 7
yardstick = time.perf_counter() - start
marks, cpus, kernels = [time.perf_counter()], [0.0], []
def mark():
    marks.append(time.perf_counter())
    cpus.append(sum(os.times()[:4]))
class Compiled(logging.Handler):
    def emit(self, record):
        if record.msg.startswith("compiled"):
            kernels.append([record.args[0], round(record.args[1], 3)])
logging.getLogger("composattn").addHandler(Compiled())
logging.getLogger("composattn").setLevel(logging.INFO)
import torch
{imports}
mark()
device, S = "{device}", {size.length}
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q, k, v, dout = (
    torch.randn({size.batch}, heads, S, {dim}, device=device, dtype=dtype)
    for heads in ({size.heads}, {size.kv_heads}, {size.kv_heads}, {size.heads})
)
ids, slopes = torch.arange(S, device=device) // 700, 2.0 ** -torch.arange(1.0, {size.heads} + 1, device=device)
bias = torch.randn({size.heads}, 2 * S, device=device, requires_grad=True)
learned = lambda s, b, h, q, kv: s + bias[h, q - kv + S]
leaves = [t.requires_grad_() for t in (q, k, v)]
wait(); mark()
if device == "cuda":
    {language}
    pass
mark()
out = call(*leaves, {options})
wait(); mark()
(out * dout).sum().backward()  # out.backward(dout) would import sympy, by torch itself: 0.4 s
wait(); mark()
imports, inputs, language, forward, backward = (b - a for a, b in zip(marks, marks[1:]))
print(json.dumps({{
    "torch": torch_s, "import": imports, "inputs": inputs, "forward": language + forward, "backward": backward,
    "language": language, "forward_cpu": cpus[4] - cpus[2], "backward_cpu": cpus[5] - cpus[4], "python": yardstick,
    "kernels": kernels,
}}))
"""


def program(case: Case, implementation: str, size: Size, device: str) -> str:
    """What the process of a sample runs."""
    imports, language = CALLED[implementation]
    options = case.ours if implementation == "composattn" else case.flex
    return PROCESS.format(
        imports=imports,
        language=language.replace("\n", "\n    "),
        device=device,
        size=size,
        dim=case.dim,
        options=options,
    )


def a_round(
    cases: Sequence[Case],
    implementation: str,
    size: Size,
    device: str,
    caches: Sequence[Path],
    until: float = math.inf,
) -> list[Sample]:
    """A sample of each case that can begin before `until`: `PARTS`, `BESIDE`, and seconds of kernels by their titles.

    The process of a case keeps what it compiles in a cache of its own.
    """
    kept = {"COMPOSATTN_CACHE_DIR": "ours", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    lines = []
    for case, cache in zip(cases, caches, strict=True):
        folders = {name: str(cache / folder) for name, folder in kept.items()}
        code = program(case, implementation, size, device)
        lines.append(json.dumps({"code": code, "folders": folders, "until": min(until, sys.float_info.max)}))
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, "-c", ROUND],
        env={**os.environ, **path},
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for case, sample in zip(cases, samples, strict=False):
        if "failed" in sample:
            raise RuntimeError(f"{implementation}, {case.name}: {sample['failed']}")
    if len(samples) < len(cases) and time.time() <= until:
        raise RuntimeError(f"{implementation}, {cases[len(samples)].name}: {done.stderr.strip()[-500:]}")
    return samples


def write_bytecode() -> None:
    """The bytecode of composattn, the kernel language and what it calls kernels with, as `pip install` writes it."""
    for package in ("cutlass", "tvm_ffi", "composattn"):
        found = importlib.util.find_spec(package)
        if found is not None:
            for folder in found.submodule_search_locations or ():
                compileall.compile_dir(folder, quiet=2, workers=0)


class Measured:
    """Samples by case, implementation and state, and rows of their medians."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str, str], list[Sample]] = {}

    def add(self, cases: Sequence[Case], implementation: str, state: str, found: list[Sample]) -> None:
        for case, sample in zip(cases, found, strict=False):  # others had no time
            self.samples.setdefault((case.name, implementation, state), []).append(sample)

    def rows(self) -> Iterator[dict[str, Any]]:
        for (name, implementation, state), found in self.samples.items():
            medians = {f"{part}_s": statistics.median(s[part] for s in found) for part in PARTS + BESIDE}
            yield {"row": f"{name}, {state}", "impl": implementation, **medians, "samples": found}


def measure(
    cases: Sequence[Case], size: Size, device: str, flex: bool, states: Sequence[str], into: Measured, until: float
) -> None:
    """A round of each implementation and state."""
    for implementation in CALLED if flex else ("composattn",):
        of = [case for case in cases if implementation == "composattn" or case.flex]
        with tempfile.TemporaryDirectory(prefix="composattn-cold-") as folder:
            caches = [Path(folder) / str(n) for n in range(len(of))]
            for state in states:
                into.add(of, implementation, state, a_round(of, implementation, size, device, caches, until))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=tuple(SETS), default="chosen")
    parser.add_argument(
        "--only", action="append", default=[], help="of these the cases with such a word; may be repeated"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds: no sample begins behind them")
    parser.add_argument("--flex", action="store_true", help="FlexAttention beside")
    parser.add_argument("--empty", action="store_true", help="no samples with kernels on disk")
    parser.add_argument("--length", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    start = time.time()
    write_bytecode()
    cases, size = SETS[options.cases]
    cases = tuple(case for case in cases if not options.only or any(word in case.name for word in options.only))
    if options.length is not None:
        size = dataclasses.replace(size, length=options.length)
    states = (NOTHING,) if options.empty else (NOTHING, ON_DISK)
    measured, facts = Measured(), provenance(torch.device(options.device))
    print(f"[{time.time() - start:4.0f} s] bytecode is there", flush=True)
    for n in range(options.repeats):
        measure(cases, size, options.device, options.flex, states, measured, start + options.within)
        print(f"[{time.time() - start:4.0f} s] round {n + 1} of {options.repeats}", flush=True)
        if options.out is not None:
            result = {**facts, "size": dataclasses.asdict(size), "rows": list(measured.rows())}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in measured.rows():
        print(f"{row['row']:36} {row['impl']:14} " + "   ".join(f"{p} {row[f'{p}_s']:5.2f}" for p in PARTS + BESIDE))


if __name__ == "__main__":
    main()
