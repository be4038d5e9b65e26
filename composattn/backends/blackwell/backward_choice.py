"""Which tiling the Blackwell backward of a call has: tables by its class. No device timed them; ptxas found the spills.

Two blocks share a tile of keys where that takes fewer clocks of the busiest unit: for 128 queries and as many keys, by
FlashAttention-4, table 3, and benchmarks/model/roofline.py, one block of D 128 takes 3,328 and two 2,688; wider rows
7,296 to 11,776 and 3,072 to 5,120. So larger tiles pay if they visit at most 1.24 times the area, wide ones nearly
always.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

from ...analysis.captured_gradient import Pattern as Sums
from ...analysis.program import Program
from ...call.problem import Problem
from ...graph.expr import Dep
from ...graph.gradient import derivative
from ..fused.planning.call_class import Facts, Finders, class_of
from ..fused.planning.tables import Table, first, table
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import fitting
from ..fused.tiles.traits import reads_pairs, sums_by
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


class BlackwellBackwardFacts(Facts):
    """What takes registers: gradients that are summed by some pattern, and others.

    `curved`: the derivative sees the score, so P and dS are computed at once.
    """

    more: ClassVar[Finders] = {
        "by_head": lambda f: sums_by(f.program, Sums.HEAD),
        "by_row": lambda f: sums_by(f.program, Sums.ROW),
        "by_column": lambda f: sums_by(f.program, Sums.COLUMN),
        "by_pair": lambda f: sums_by(f.program, Sums.PAIR),
        "by_distance": lambda f: sums_by(f.program, Sums.DISTANCE),
        "scored": lambda f: f.program.score is not None,
        "reads": lambda f: reads_pairs(f.program.score),
        "curved": lambda f: f.scored and bool(derivative(f.program.score).deps & Dep.SCORE),
    }


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> BlackwellBackwardTiling:
    """Tiles of the backward kernel: they fill shared and tensor memory."""
    facts = _facts(problem, program, target, deterministic)
    kind = kind_of(facts)
    kernel, d = kind.tiling.kernel, kind.padded(facts.d)
    registers = first(REGISTERS, facts, kernel=kernel)
    fixed: dict[str, Any] = {
        "kernel": kernel, "tile_m": kind.tile_m, "tile_n": kind.tile_n, "d": d, "dv": kind.padded(facts.dv),
        "roles": BackwardRoles(registers.compute, registers.dq, registers.other), "in_halves": registers.in_halves,
        "dq_at_once": min(registers.columns, d // kind.tiling.sharing),
        "distances": GROUPS * WARPGROUP * (kind.scores // RUN) * (kind.scores + 32) * facts.by_distance,
        "heads_together": problem.schedule.heads_together,
    }  # fmt: skip
    names, *tries = first(STAGES, facts, kernel=kernel)
    return fitting((kind.tiling(**fixed, **dict(zip(names, numbers, strict=True))) for numbers in tries), target)


def backward_words(problem: Problem, program: Program, target: Target, deterministic: bool) -> str:
    """The class of a call, and that nobody measured what it gets, for people to read."""
    facts = _facts(problem, program, target, deterministic)
    return f"{facts.call}\n    {kind_of(facts).tiling.kernel}; not measured: no device has timed it"


def _facts(problem: Problem, program: Program, target: Target, deterministic: bool) -> BlackwellBackwardFacts:
    call = class_of(problem, program, target, "backward", rows=ROWS, deterministic=deterministic)
    return BlackwellBackwardFacts(problem, program, target, call)


def kind_of(facts: Facts) -> Kind:
    """The kernel of one block for a tile of keys, or of two."""
    return first(TABLE, facts)
