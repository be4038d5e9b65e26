"""Which tensors of 8 bits are made 16-bit numbers before the kernels of warps, and which are refused."""

from __future__ import annotations

from ...analysis.program import Program
from ...call.problem import Problem


def refuses_eight_bits(problem: Problem, program: Program) -> str:
    """Which of a call's have no kernel, "" where there is one."""
    return "keys and values of 8 bits in pages have no kernel" if problem.layout.kv == "paged" else ""
