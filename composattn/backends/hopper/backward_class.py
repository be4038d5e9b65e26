"""What kind of call a Hopper backward is: its class, and the largest tile for which registers are left, by a table."""

from __future__ import annotations

import dataclasses

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import CallClass, class_of
from ..fused.planning.tables import Table, first, table
from ..fused.tiles.target import Target
from .backward_tiling import FILE

KEYS = 128  # of a tile
PAIRS: Table[bool] = table(FILE, "pairs", bool)
LARGEST: Table[int] = table(FILE, "largest", int)  # found by compiling


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardClass(CallClass):
    """Backward calls that are cut alike.

    `group`: query heads of a key/value head. `ratio`: so many times as many queries as keys, of dense calls.
    `pairs`: a tensor is read at each pair, or a test computes as much, of no wider V than K. `largest`: queries of the
    largest tile for which registers are left; above D 128, where tiles have 64, keys.
    """

    group: int
    ratio: int
    pairs: bool
    largest: int


def backward_class(problem: Problem, program: Program, target: Target, deterministic: bool) -> BackwardClass:
    """The class of a backward whose dQ is summed in any order, or in a fixed one."""
    call = class_of(problem, program, target, "backward", rows=KEYS, deterministic=deterministic)
    return BackwardClass(
        **vars(call),
        group=problem.group,
        ratio=problem.q_len // max(1, problem.kv_len) if problem.layout.is_dense else 1,
        pairs=call.d >= call.dv and first(PAIRS, call),
        largest=first(LARGEST, call),
    )
