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
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.inspect import Artifact
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
SPILLED = 8
"""The most moves of spilled registers that a tile may cost; docs/gpus.md names the kernels that have some anywhere."""


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
    """What was compiled least comes first."""
    archs = sorted(GPUS, key=["sm_86", "sm_121a", "sm_80", "sm_89", "sm_120a", "sm_87"].index)
    return [kind(GPUS[arch], *names) for arch, *names in itertools.product(archs, DIMS, MODS, layouts)]


def moves_of_each_tile(made: Artifact) -> int:
    """Moves of spilled registers in innermost loops with products; the others are made once for a block or a run."""
    code = made.instructions
    loops = [
        range(at.target, n)
        for n, at in enumerate(code)
        if at.target is not None and any(code[i].name == "HMMA" for i in range(at.target, n))
    ]
    inner = [loop for loop in loops if not any(set(other) < set(loop) for other in loops)]
    return sum(code[n].name in ("STL", "LDL") for loop in inner for n in loop)


def row(cell: Cell) -> Row:
    """What the compiler made of a cell, in numbers, and what is wrong with it. Wants cuobjdump and nvdisasm."""
    plan = cell.plan
    with tempfile.TemporaryDirectory(prefix="composattn-") as aside:  # 200 kB each, which nobody asks for again
        made = compile_offline(plan, Path(aside))
        each = moves_of_each_tile(made)
        faults = [f"{each} moves of spilled registers for each tile"] * (made.spills is None or each > SPILLED)
        faults += [f"{made.shared_memory} bytes of shared memory"] * (made.shared_memory > cell.target.shared_memory)
        return {
            "spills": made.spills, "of each tile": each, "stack": made.stack, "registers": made.registers,
            "shared": made.shared_memory, "threads": made.threads, "instructions": len(made.instructions),
            "faults": faults,
        }  # fmt: skip


FORWARD = Matrix(cells(Cell, *LAYOUTS), row, RESULTS / "warp.json")
BACKWARD = Matrix(cells(BackwardCell, "dense", "packed"), row, RESULTS / "warp-backward.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FORWARD, BACKWARD))
