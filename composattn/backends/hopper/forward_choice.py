"""Which tiling the Hopper forward of a call has; the choices were measured on an H200 (benchmarks/LOG.md)."""

from __future__ import annotations

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.few_queries import packed_heads
from ..fused.target import Target
from ..fused.tiling import slots
from ..fused.traits import padded, queries
from .few_rows import few_rows
from .large_blocks import large
from .long_documents import documents, has_long_documents
from .small_blocks import alone, is_short, run_at_once, small
from .tiling import ROWS, HopperTiling
from .wide_tiling import WideTiling, wide_tiling


def forward_tiling(problem: Problem, program: Program, target: Target) -> HopperTiling | WideTiling:
    """Tiles of the forward kernel; the choices were measured on an H200 (benchmarks/LOG.md)."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if max(d, dv) > 256:
        return wide_tiling(problem, program, target)
    heads = packed_heads(problem, program, ROWS)
    if queries(problem) * slots(heads) <= ROWS:
        return few_rows(problem, program, target, heads)
    widest = max(d, dv)
    invariant = problem.schedule.batch_invariant
    if run_at_once(problem, program, target, heads):
        return alone(problem, program, target, heads)
    if widest == 128 and has_long_documents(problem, program, heads):
        return documents(problem, program, heads)
    # 128 keys of D 128 leave a multiprocessor room for one such block
    if is_short(problem, program, widest) and not (invariant and widest > 96):
        return small(problem, program, target, heads)
    return large(problem, program, target, heads)
