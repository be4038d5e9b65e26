"""Writes the tables of docs/gpus.md: which GPU has which kernels, and of those of warps tiles, spills and first calls.

python docs/make_gpus.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import composattn as ca
from benchmarks.report import between
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.target import TARGETS
from composattn.call.problem import Problem
from composattn.mods import alibi, causal, softcap

PAGE = Path(__file__).with_name("gpus.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ALSO = {
    (8, 0): "A30", (8, 6): "other RTX 30, A10, A10G, A40, RTX A6000", (8, 7): "Orin NX and Nano",
    (8, 9): "other RTX 40, L4, L40S, RTX 6000 Ada", (9, 0): "H100, GH200", (10, 0): "GB200", (10, 3): "GB300",
    (12, 0): "other RTX 50, RTX PRO 6000 Blackwell", (12, 1): "DGX Spark",
}  # fmt: skip
"""What people call other GPUs of a compute capability (https://developer.nvidia.com/cuda-gpus)."""
MODS = {
    "causal": {"mask_mod": causal()},
    "causal, soft cap": {"mask_mod": causal(), "score_mod": softcap(30.0)},
    "causal, ALiBi": {"mask_mod": causal(), "score_mod": alibi(16)},
}


def gpus() -> Iterator[str]:
    """Each compute capability: whose kernels it has, and what they do."""
    head = "compute capability", "for example", "machine code", "backend", "forward, D and Dv up to", "gradients up to"
    yield f"| {' | '.join(head)} | ran there |"
    yield "|---|---|---|---|---|---|---|"
    for (major, minor), target in TARGETS.items():
        names = f"{target.gpu}, {ALSO[major, minor]}"
        of = ARCHITECTURES[target.backend]
        learns = str(of.max_gradient_dim) if of.max_gradient_dim else "`streaming`'s"
        widest = (
            f"{of.max_head_dim}" if of.max_head_dim == of.max_value_dim else f"{of.max_head_dim}, {of.max_value_dim}"
        )
        ran = "yes" if of.ran else "no"
        yield f"| {major}.{minor} | {names} | {target.arch} | `{of.name}` | {widest} | {learns} | {ran} |"


def tiles() -> Iterator[str]:
    """Queries, keys and shared memory of a block of the forward of warps, by head dimension and mods."""
    names = ["sm_80", "sm_86"]
    yield (
        "| D | mods | " + " | ".join(f"{name}: queries x keys, KB of a block, blocks of an SM" for name in names) + " |"
    )
    yield "|---|---|" + "---|" * len(names)
    for d in (64, 96, 128, 192, 256):
        for words, mods in MODS.items():
            cells = []
            for name in names:
                target = next(t for t in TARGETS.values() if t.arch == name)
                problem = Problem(1, 16, 16, 8192, 8192, d, d, torch.bfloat16, torch.device("cpu"))
                plan = plan_forward(problem, ca.Attention(**mods).program, target)  # type: ignore[arg-type]
                tiling = plan.tiling
                cells.append(f"{tiling.queries} x {tiling.tile_n}, {plan.shared_memory / 1024:.0f}, {tiling.blocks}")
            yield f"| {d} | {words} | {' | '.join(cells)} |"


def spills() -> Iterator[str]:
    """Kernels of the compile matrix by machine code: how many, how many spill, and which."""
    yield "| machine code | direction | kernels | spill nothing | moves of spilled registers in the others |"
    yield "|---|---|---|---|---|"
    for direction, file in (("forward", "warp.json"), ("backward", "warp-backward.json")):
        kept = json.loads((RESULTS / "compiled" / file).read_text())
        at = kept["fields"].index("spills")
        moves = {name: row[at] for name, row in kept["rows"].items()}
        for arch in dict.fromkeys(name.split()[0] for name in moves):
            of_arch = {name.removeprefix(f"{arch} "): n for name, n in moves.items() if name.startswith(f"{arch} ")}
            some = "; ".join(f"{name} {count}" for name, count in of_arch.items() if count)
            yield f"| {arch} | {direction} | {len(of_arch)} | {list(of_arch.values()).count(0)} | {some} |"


def first_calls() -> Iterator[str]:
    """What a new process waits for, by call: a forward, of it the import of the kernel language, its gradients."""
    kept = json.loads((RESULTS / "warp" / "h200-cold.json").read_text())
    columns = {
        "forward_s": "forward, s", "language_s": "of it the import of the kernel language, s",
        "backward_s": "gradients, s", "python_s": "two million steps of Python, s",
    }  # fmt: skip
    yield f"| call | {' | '.join(columns.values())} |"
    yield "|---|" + "---|" * len(columns)
    for row in sorted(kept["rows"], key=lambda row: (int(row["row"].split()[1]), row["row"])):
        yield f"| {row['row'].split(',')[0]} | {' | '.join(f'{row[name]:.2f}' for name in columns)} |"
    yield f"\nOf commit {kept['commit'][:8]}, on a host where `import torch` takes {kept['rows'][0]['torch_s']:.1f} s."


def page() -> str:
    text = PAGE.read_text()
    for name, rows in (("gpus", gpus()), ("tiles", tiles()), ("spills", spills()), ("first calls", first_calls())):
        text = between(text, "\n".join(rows), name, "docs/make_gpus.py")
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
