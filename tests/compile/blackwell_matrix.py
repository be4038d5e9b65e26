"""The Blackwell kernels, compiled for each head dimension, dtype, mod, layout and target: is each kernel lean?

    python -m tests.compile.blackwell_matrix --seconds 450       and more: see `compiled_cells`

`benchmarks/results/compiled/blackwell.json` keeps what was made of each cell (`blackwell-backward.json`: of gradients).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks.model.sass import instructions
from composattn import mods
from composattn.backends.blackwell.tensor_memory import COLUMNS
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.inspect import Artifact
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.planning.plan_backward import BackwardPlan, plan_backward
from composattn.backends.fused.tiles.target import BLACKWELL, TARGETS, Target
from composattn.call.problem import DENSE
from composattn.call.schedule import Schedule
from tests.compile.blackwell_plans import HEADS, LENGTH, PACKED, PAGES, problem_of, program_of
from tests.compile.compiled_cells import RESULTS, Matrix, Row, main

DIMS = {"d128": (128, 128), "d64": (64, 64), "d192/128": (192, 128), "d256": (256, 256), "d96": (96, 96),
        "d192": (192, 192)}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
IDS = torch.arange(LENGTH, dtype=torch.int32) // 300
BLOCKS = torch.ones(1, 1, LENGTH // 128, LENGTH // 128, dtype=torch.bool).tril()
MODS: dict[str, Callable[[], ca.Attention]] = {
    "none": lambda: ca.Attention(),
    "causal": lambda: ca.Attention(mask_mod=mods.causal()),
    "documents": lambda: ca.Attention(mask_mod=mods.document(IDS)),
    "block-sparse": lambda: ca.Attention(mask_mod=ca.BlockSparse(BLOCKS, 128, partial=mods.causal())),
    "alibi": lambda: ca.Attention(score_mod=mods.alibi(HEADS), mask_mod=mods.causal()),
    "softcap": lambda: ca.Attention(score_mod=mods.softcap(30.0), mask_mod=mods.causal()),
    "relative-bias": lambda: ca.Attention(
        score_mod=mods.relative_bias(torch.zeros(HEADS, 2 * 128 + 1)), mask_mod=mods.causal()
    ),
    "window": lambda: ca.Attention(mask_mod=mods.sliding_window(512)),
}
"""Score mods under a causal mask, so that tiles with a test and without are there."""


LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "split": {"q_len": 8, "kv_heads": 2, "schedule": Schedule(split_kv=2)},  # packed rows, one query tile
    "paged": {"layout": PAGES},
    "varlen": {"layout": PACKED},
}
"""How the sequences of a call lie, how many queries they have, how the work is divided: of `problem_of`."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kernel, by the names of its parts."""

    target: Target
    dtype: str
    layout: str
    dim: str
    mod: str

    def __str__(self) -> str:
        return f"{self.target.arch} {self.dtype} {self.layout} {self.dim} {self.mod}"

    @property
    def plan(self) -> ForwardPlan | BackwardPlan:
        d, dv = DIMS[self.dim]
        problem = problem_of(d, dv, DTYPES[self.dtype], **LAYOUTS[self.layout])
        return plan_forward(problem, MODS[self.mod]().program, self.target)


LEARNED = {
    name: torch.zeros(size, requires_grad=True)
    for name, size in {"row": (HEADS, LENGTH), "column": (LENGTH,), "distance": (HEADS, 2 * LENGTH),
                       "pair": (LENGTH, LENGTH), "head": (HEADS,)}.items()
}  # fmt: skip
SUMS: dict[str, Callable[..., object]] = {
    "by-row": lambda s, b, h, q, kv: s + 0.01 * LEARNED["row"][h, q] * (q - kv),
    "by-column": lambda s, b, h, q, kv: s + LEARNED["column"][kv],
    "by-distance": lambda s, b, h, q, kv: s + LEARNED["distance"][h, q - kv + LENGTH],
    "by-distance-in-softcap": lambda s, b, h, q, kv: 5 * torch.tanh((s + LEARNED["distance"][h, q - kv + LENGTH]) / 5),
    "by-pair": lambda s, b, h, q, kv: s + LEARNED["pair"][q, kv],
    "by-head": lambda s, b, h, q, kv: s - LEARNED["head"][h] * (q - kv),
}
"""Score mods that read a tensor whose gradient is summed, by the pattern of the sum."""
BACKWARD_LAYOUTS = {"dense": (DENSE, False), "varlen": (PACKED, False), "in-order": (DENSE, True)}


@dataclasses.dataclass(frozen=True)
class BackwardCell(Cell):
    """The kernel of dK and dV, and of the sums of dQ and of captured tensors; `in-order`: dQ in a fixed order."""

    @property
    def plan(self) -> BackwardPlan:
        (layout, in_order), (d, dv) = BACKWARD_LAYOUTS[self.layout], DIMS[self.dim]
        problem = problem_of(d, dv, DTYPES[self.dtype], layout)
        if self.mod in MODS:
            program = MODS[self.mod]().program
        else:
            program = program_of(SUMS[self.mod], mods.causal(), learned=True)
        return plan_backward(problem, program, self.target, deterministic=in_order, cut=None).main


def cells(backward: bool = False) -> list[Cell]:
    """All 768 (1008 of the backward), what differs most first: fp16 and sm_103a change single instructions."""
    targets = [TARGETS[10, minor] for minor in (0, 3)]
    layouts, named, kind = (BACKWARD_LAYOUTS, (*MODS, *SUMS), BackwardCell) if backward else (LAYOUTS, MODS, Cell)
    found = itertools.product(targets, DTYPES, layouts, DIMS, named)
    return sorted((kind(*names) for names in found), key=lambda cell: cell.dtype == "fp16")


# --- what a kernel has to be ----------------------------------------------------------------------------------

UNITS = {
    "UTCHMMA": "products into tensor memory", "LDTM": "loads of tensor memory", "STTM": "stores to tensor memory",
    "UTMALDG": "bulk tensor loads", "UTMASTG": "bulk tensor stores",
}  # fmt: skip


def faults(artifact: Artifact) -> Iterator[str]:
    """What keeps a kernel from being lean, in words; none for one that fits, spills nothing and uses its units.

    Wants cuobjdump and nvdisasm.
    """
    plan = artifact.plan
    assert isinstance(plan, ForwardPlan | BackwardPlan) and artifact.registers is not None
    if artifact.spills or artifact.stack:
        yield f"{artifact.spills} moves of spilled registers, {artifact.stack} bytes of stack"
    if artifact.shared_memory > BLACKWELL.shared_memory:
        yield f"{artifact.shared_memory} bytes of shared memory"
    if artifact.registers * artifact.threads > BLACKWELL.registers:
        yield f"{artifact.registers} registers for each of {artifact.threads} threads"
    for name, what in UNITS.items():
        direct = isinstance(plan, ForwardPlan) and plan.direct_store
        if not artifact.mnemonics[name] and not (name == "UTMASTG" and direct):
            yield f"no {what}"
    columns = allocated(plan)
    if columns > COLUMNS or not frees_what_it_allocates(artifact.ptx, columns):
        yield f"{columns} columns of tensor memory, or not freed on every path"


def allocated(plan: ForwardPlan | BackwardPlan) -> int:
    """Columns of tensor memory that a block asks for."""
    tiling: Any = plan.tiling
    return int((tiling.columns if isinstance(plan, BackwardPlan) else tiling.tensor_memory).allocated)


def frees_what_it_allocates(ptx: str, columns: int) -> bool:
    """One warp asks for so many columns and frees as many; no path ends between, and all threads meet before, those of
    a pair of blocks too.
    """
    asked = re.findall(r"mov\.b32 \t(%r\d+), (\d+);\n\ttcgen05\.alloc\S+ \t\[\S+\], \1;", ptx)
    freed = re.findall(r"mov\.b32 \t(%r\d+), (\d+);\n\ttcgen05\.dealloc\S+ \t%r\d+, \1;", ptx)
    if not [n for _, n in asked] == [n for _, n in freed] == [str(columns)]:
        return False
    held = ptx[ptx.index("tcgen05.alloc") : ptx.index("tcgen05.dealloc")]
    used = max(held.rindex(name) for name in ("tcgen05.ld", "tcgen05.mma", "mbarrier.try"))
    return "ret;" not in held and max(held.rfind("bar.sync"), held.rfind("barrier.cluster.wait")) > used


def row(cell: Cell) -> Row:
    """What the compiler made of a cell, in numbers, what is wrong with it, and a hash of its PTX (entry: `kernel`)."""
    plan = cell.plan
    with tempfile.TemporaryDirectory(prefix="composattn-") as aside:  # 200 kB each, which nobody asks for again
        made = compile_offline(plan, Path(aside))
        text = made.ptx.replace(made.entry, "kernel")
        return {
            "spills": made.spills, "stack": made.stack, "registers": made.registers, "shared": made.shared_memory,
            "columns": allocated(plan),
            "instructions": len(instructions(made)), **{name: made.mnemonics[name] for name in UNITS},
            "faults": list(faults(made)), "ptx": hashlib.sha256(text.encode()).hexdigest()[:16],
        }  # fmt: skip


FORWARD = Matrix(cells(), row, RESULTS / "blackwell.json")
BACKWARD = Matrix(cells(backward=True), row, RESULTS / "blackwell-backward.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FORWARD, BACKWARD))
