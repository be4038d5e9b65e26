"""Which tensors of 8 bits the Hopper forward takes."""

from __future__ import annotations

from ...analysis.program import Program
from ...call.eight_bits import EIGHT_BITS
from ...call.problem import Problem
from ...graph.expr import Dep


def refuses_eight_bits(problem: Problem, program: Program) -> str:
    """Which of a call's have no kernel, "" where there is one."""
    if problem.types.q in EIGHT_BITS:
        return "FP8 queries have no kernel"
    if program.values is not None and program.values.deps & Dep.KV and program.values.deps & Dep.D:
        return "scales of values by key and by channel at once have no kernel"
    return ""
