"""Which tensors of 8 bits the Hopper forward takes."""

from __future__ import annotations

import torch

from ...analysis.program import Program
from ...call.problem import Problem
from ...graph.expr import Dep
from ..fused.tiles.tiling import slots
from .tiling import ROWS

E4M3 = torch.float8_e4m3fn
WIDEST = 256  # D and Dv
CHUNK = 16  # bytes that rows of bulk copies are multiples of


def multiplies_eight_bits(problem: Problem) -> bool:
    """Whether a call's products are of 8 bits; else its queries are widened, and meet keys that are.

    Of few queries the memory is the limit, which products of 16 bits reach too. Keys in pages and a fixed order of sums
    have kernels of 16 bits.
    """
    types, dims = problem.types, (problem.head_dim, problem.head_dim_v)
    few = problem.queries * slots(problem.group) <= ROWS
    return (
        types[:3] == (E4M3, E4M3, E4M3)
        and types.out in (torch.bfloat16, torch.float16)
        and max(dims) <= WIDEST
        and not any(d % CHUNK for d in dims)
        and not (few or problem.layout.kv == "paged" or problem.schedule.batch_invariant)
    )


def refuses_eight_bits(problem: Problem, program: Program) -> str:
    """Which of a call's have no kernel, "" where there is one."""
    if program.values is not None and program.values.deps & Dep.KV and program.values.deps & Dep.D:
        return "scales of values by key and by channel at once have no kernel"
    return ""
