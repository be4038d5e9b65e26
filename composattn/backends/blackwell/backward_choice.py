"""Which tiling the Blackwell backward of a call has: tables by its class. No device timed them; ptxas found the spills.

Two blocks share a tile of keys where that takes fewer clocks of the busiest unit: for 128 queries and as many keys, by
FlashAttention-4, table 3, and benchmarks/model/roofline.py, one block of D 128 takes 3,328 and two 2,688; wider rows
7,296 to 11,776 and 3,072 to 5,120. So larger tiles pay if they visit at most 1.24 times the area, wide ones nearly
always.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ...analysis.captured_gradient import Pattern as Sums
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import CallClass, class_of
from ..fused.planning.tables import Table, first, table
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import fitting
from ..fused.tiles.traits import reads_pairs, sees_score, sums_by
from .backward_tiling import (
    BlackwellBackwardTiling,
    BlackwellPairBackwardTiling,
    QueryPairTiling,
    WideBackwardTiling,
    WidePairBackwardTiling,
)
from .roles import WARPGROUP, BackwardRoles
from .tensor_memory import GROUPS, STRIP
from .tiling import FILE, ROWS

RUN = 16  # scores of a thread that are a chain of sums by distance, see `primitives.lane_diagonals`
L2 = 64 << 20


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kernel, and `scores` of a thread in a row. Rows have `least` columns, or more that are whole `steps`."""

    tiling: type[BlackwellBackwardTiling]
    tile_m: int
    tile_n: int
    scores: int
    least: int = 128
    steps: int = 64

    def padded(self, columns: int) -> int:
        return max(self.least, -(-columns // self.steps) * self.steps)


KINDS = {
    "one": Kind(BlackwellBackwardTiling, ROWS, ROWS, ROWS // GROUPS, least=32, steps=32),
    "wide": Kind(WideBackwardTiling, ROWS, ROWS // 2, ROWS // 2 // GROUPS),
    "pair": Kind(BlackwellPairBackwardTiling, ROWS, 2 * ROWS, ROWS // GROUPS),
    "wide pair": Kind(WidePairBackwardTiling, ROWS, 2 * ROWS, STRIP),
    "query pair": Kind(QueryPairTiling, 2 * ROWS, ROWS, ROWS // GROUPS, least=256),
}
TABLE: Table[Kind] = table(FILE, "kinds", KINDS.__getitem__)
STAGES: Table[list[list[Any]]] = table(FILE, "stages")  # names of fields that take room, and numbers to try


class Registers(NamedTuple):
    """Registers by role, columns of dQ that a thread has at once, and whether it has half of its queries at a time."""

    compute: int
    dq: int
    other: int
    columns: int
    in_halves: bool = False


REGISTERS: Table[Registers] = table(FILE, "registers", lambda said: Registers(**said))


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> BlackwellBackwardTiling:
    """Tiles of the backward kernel: they fill shared and tensor memory."""
    call = class_of(problem, program, target, "backward", rows=ROWS, deterministic=deterministic)
    kind = kind_of(call, program)
    kernel, d = kind.tiling.kernel, kind.padded(call.d)
    registers = first(REGISTERS, call, kernel=kernel, **_facts(call, program))
    fixed: dict[str, Any] = {
        "kernel": kernel, "tile_m": kind.tile_m, "tile_n": kind.tile_n, "d": d, "dv": kind.padded(call.dv), "l2": L2,
        "roles": BackwardRoles(registers.compute, registers.dq, registers.other), "in_halves": registers.in_halves,
        "dq_at_once": min(registers.columns, d // kind.tiling.sharing),
        "distances": distances_of(kind.scores) * sums_by(program, Sums.DISTANCE),
        "heads_together": problem.schedule.heads_together,
    }  # fmt: skip
    names, *tries = first(STAGES, call, kernel=kernel)
    return fitting((kind.tiling(**fixed, **dict(zip(names, numbers, strict=True))) for numbers in tries), target)


def backward_words(problem: Problem, program: Program, target: Target, deterministic: bool) -> str:
    """The class of a call, and that nobody measured what it gets, for people to read."""
    call = class_of(problem, program, target, "backward", rows=ROWS, deterministic=deterministic)
    return f"{call}\n    {kind_of(call, program).tiling.kernel}; not measured: no device has timed it"


def kind_of(call: CallClass, program: Program) -> Kind:
    """The kernel of one block for a tile of keys, or of two."""
    return first(TABLE, call, **_facts(call, program))


def _facts(call: CallClass, program: Program) -> dict[str, bool]:
    """What takes registers: gradients that are summed by some pattern, and others.

    `curved`: the derivative sees the score, so P and dS are computed at once.
    """
    return {f"by_{pattern.name.lower()}": sums_by(program, pattern) for pattern in Sums} | {
        "scored": program.score is not None,
        "reads": reads_pairs(program.score),
        "curved": sees_score(program),
        "fixed": call.order == "fixed",
    }


def distances_of(count: int) -> int:
    """Numbers through which sums by distance pass, of a thread's `count` scores."""
    return GROUPS * WARPGROUP * (count // RUN) * (count + 32)
