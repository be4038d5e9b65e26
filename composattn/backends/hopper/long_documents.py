"""How the Hopper forward cuts long documents."""

from __future__ import annotations

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.stretches import falls_apart
from ..fused.traits import changes_weights, has_bounded_documents, keys, may_pass, padded
from ..fused.work import captured_decide
from .forward_fields import HELD, keys_by_registers, tiling_of
from .tiling import FROM_FIRST, ROWS, HopperTiling

# Keys above which documents by ids take two warpgroups that share K and V and pass by what only the other sees (D 128,
# 8k: 3 % of eight causal documents, 7 % of full ones), not blocks of one
LONG_DOCUMENTS = 4096


def has_long_documents(problem: Problem, program: Program, heads: int) -> bool:
    plain = not changes_weights(program) and may_pass(problem, program, heads)
    return plain and captured_decide(program.intervals) and keys(problem) > LONG_DOCUMENTS


def documents(problem: Problem, program: Program, heads: int) -> HopperTiling:
    """Two warpgroups, with 128 keys at a time where tiles begin with documents (H200, 8k: 2 to 16 % before 112).

    Else with 112 (1 to 2 % before 96 and 128). Blocks stay (2 to 12 %), but of full documents with which no tiles
    begin, so that they differ more (4 % lost).
    """
    asked, apart = problem.schedule.persistent, falls_apart(problem, program)
    stays = apart or has_bounded_documents(program.mask) if asked is None else asked
    return tiling_of(
        problem,
        heads,
        tile_m=2 * ROWS,
        tile_n=min(keys_by_registers(240, padded(problem.head_dim_v), program), 128 if apart else 112),
        stages=2,
        warpgroups=2,
        consumer_registers=240,
        producer_registers=24,
        pingpong=True,
        persistent=stays,
        drawn="early" if stays else None,
        # eight documents gain 3 %, causal ones too, twelve nothing
        held=HELD.get((padded(problem.head_dim), padded(problem.head_dim_v)), 0) if stays else 0,
        output_wait="first",
        heads_together=problem.schedule.heads_together,
        kernel=FROM_FIRST,
    )
