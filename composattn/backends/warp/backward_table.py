"""Tiles of the backward by head dimension: a table, of which the first row that fits is taken."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ...analysis.captured_gradient import Pattern as Sums
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.tables import Evidence, Table, matches, table
from ..fused.tiles.target import Target
from ..fused.tiles.traits import padded, sums_by
from .backward_tiling import WarpBackwardTiling
from .forward_table import FILE, RESERVED

L2 = 16 << 20  # bytes of what the heads read and add to that run together


@dataclasses.dataclass(frozen=True)
class BackwardShape:
    """Tiles of so many keys, which stay, and queries, see `WarpBackwardTiling`."""

    keys: int
    queries: int
    warps: int
    score_keys: int
    sum_keys: int
    dq_rows: int
    stages: int = 1
    blocks: int = 1

    def __str__(self) -> str:
        return (
            f"{self.keys} keys, {self.queries} queries, {self.warps} warps of {self.score_keys} keys of scores, "
            f"{self.sum_keys} of sums, {self.dq_rows} rows of dQ, {self.stages} stages, {self.blocks} blocks"
        )


class Facts(NamedTuple):
    """What rows of the table ask for: the `widest` of D and Dv on chip."""

    widest: int


SHAPES: Table[BackwardShape] = table(FILE, "backward", lambda says: BackwardShape(**says))


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> WarpBackwardTiling:
    """Tiles of the backward kernel: the first row of the table that is of such calls and fits in shared memory."""
    return _chosen(problem, program, target)[0]


def backward_words(problem: Problem, program: Program, target: Target, deterministic: bool) -> str:
    """What says so, for people to read."""
    return str(_chosen(problem, program, target)[1])


def _chosen(problem: Problem, program: Program, target: Target) -> tuple[WarpBackwardTiling, Evidence]:
    facts = Facts(max(padded(problem.head_dim), padded(problem.head_dim_v)))
    tilings = ((shaped(row.says, problem, program), row.evidence) for row in SHAPES if matches(facts, row.pattern))
    return next((tiling, evidence) for tiling, evidence in tilings if fits(tiling, target))


def fits(tiling: WarpBackwardTiling, target: Target) -> bool:
    """Whether warps have whole parts, and an SM holds as many blocks as the tiling wants, with what each reserves."""
    of_a_block = tiling.shared_memory(element_bytes=2) + RESERVED
    return tiling.is_whole and tiling.blocks * of_a_block <= target.shared_memory + RESERVED


def shaped(shape: BackwardShape, problem: Problem, program: Program) -> WarpBackwardTiling:
    """The tiling of a shape."""
    tiling = WarpBackwardTiling(
        tile_m=shape.queries,
        tile_n=shape.keys,
        d=padded(problem.head_dim),
        dv=padded(problem.head_dim_v),
        l2=L2,
        heads_together=problem.schedule.heads_together,
        warps=shape.warps,
        score_keys=shape.score_keys,
        sum_keys=shape.sum_keys,
        dq_rows=shape.dq_rows,
        stages=shape.stages,
        blocks=shape.blocks,
    )
    return tiling.with_distances() if sums_by(program, Sums.DISTANCE) else tiling
