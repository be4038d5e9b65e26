"""The kernels of warps, compiled for each of their GPUs, head dimension, mod and layout: does each fit into registers?

    python -m tests.compile.warp_matrix --seconds 450       and more: see `compiled_cells`

`benchmarks/results/compiled/warp.json` keeps what was made of each cell (`warp-backward.json`: of gradients).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks.model.sass import instructions
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.planning.plan_backward import BackwardPlans, plan_backward
from composattn.backends.fused.tiles.target import TARGETS, Target
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, document, sliding_window, softcap
from tests.compile.compiled_cells import RESULTS, Matrix, Row, main

LENGTH, HEADS = 8192, 16
IDS, BIAS = torch.arange(LENGTH) // 1000, torch.randn(HEADS, 2 * LENGTH, requires_grad=True)
BLOCKS = torch.rand(1, 1, LENGTH // 128, LENGTH // 128) < 0.3
MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask_mod": causal()},
    "window": {"mask_mod": causal() & sliding_window(1024)},
    "documents": {"mask_mod": causal() & document(IDS)},
    "ALiBi": {"mask_mod": causal(), "score_mod": alibi(HEADS)},
    "soft-cap": {"mask_mod": causal(), "score_mod": softcap(30.0)},
    "learned-bias": {"mask_mod": causal(), "score_mod": lambda s, b, h, q, kv: s + BIAS[h, q - kv + LENGTH]},
    "block-sparse": {"mask_mod": ca.BlockSparse(BLOCKS, 128)},
}
DIMS = (64, 96, 128, 192, 256)
PACKED = Layout("packed", "packed")
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"layout": PACKED},
    "paged": {"layout": Layout("dense", "paged", page_size=64, used_kv=True)},
    "split": {"q_len": 8, "schedule": Schedule(split_kv=4)},
}
GPUS = {t.arch: t for t in TARGETS.values() if t.backend == "warp"}
ARCHES = [arch for arch in GPUS if arch != "sm_87"]  # which has the plans of sm_80
SPILLED = 8
"""The most moves of spilled registers that a kernel may have."""


def problem_of(d: int, layout: Layout = DENSE, q_len: int = LENGTH, **options: Any) -> Problem:
    sizes = 2, HEADS, HEADS // 4, q_len, LENGTH, d, d
    return Problem(*sizes, torch.bfloat16, torch.device("cpu"), layout=layout, **options)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A forward, by the names of its parts."""

    target: Target
    d: int
    mod: str
    layout: str

    def __str__(self) -> str:
        return f"{self.target.arch} D{self.d} {self.mod} {self.layout}"

    @property
    def plan(self) -> ForwardPlan:
        problem = problem_of(self.d, **LAYOUTS[self.layout])
        return plan_forward(problem, ca.Attention(**MODS[self.mod]).program, self.target)


@dataclasses.dataclass(frozen=True)
class BackwardCell(Cell):
    """A backward, by the names of its parts; no pages have one, and a split is a forward's."""

    @property
    def plans(self) -> BackwardPlans:
        program = ca.Attention(**MODS[self.mod]).program
        if self.mod == "learned-bias":
            program = GradientProgram(program, fused_reads(program))
        return plan_backward(problem_of(self.d, **LAYOUTS[self.layout]), program, self.target)

    @property
    def plan(self) -> Any:
        return self.plans.main


def cells(kind: type[Cell], *layouts: str) -> list[Any]:
    return [kind(GPUS[arch], *names) for arch, *names in itertools.product(ARCHES, DIMS, MODS, layouts)]


def row(cell: Cell) -> Row:
    """What the compiler made of a cell, in numbers, and what is wrong with it. Wants cuobjdump and nvdisasm."""
    plan = cell.plan
    with tempfile.TemporaryDirectory(prefix="composattn-") as aside:  # 200 kB each, which nobody asks for again
        made = compile_offline(plan, Path(aside))
        faults = [f"{made.spills} moves of spilled registers"] * (made.spills is None or made.spills > SPILLED)
        faults += [f"{made.shared_memory} bytes of shared memory"] * (made.shared_memory > cell.target.shared_memory)
        return {
            "spills": made.spills, "stack": made.stack, "registers": made.registers,
            "shared": made.shared_memory, "threads": made.threads, "instructions": len(instructions(made)),
            "faults": faults,
        }  # fmt: skip


FORWARD = Matrix(cells(Cell, *LAYOUTS), row, RESULTS / "warp.json")
BACKWARD = Matrix(cells(BackwardCell, "dense", "packed"), row, RESULTS / "warp-backward.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FORWARD, BACKWARD))
