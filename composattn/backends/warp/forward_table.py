"""Tiles of the forward by head dimension and mods: a table, of which the first row that fits is taken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import MaskKind, mask_of, mods_of
from ..fused.planning.tables import Evidence, Table, matches, table
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import slots
from ..fused.tiles.traits import padded, queries
from .tiling import WarpTiling

FEW = 64  # rows of the smallest tile
RESERVED = 1024  # bytes of shared memory that each block takes beside its own


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tiles of so many rows and keys; each warp has `warp_rows`, an SM so many `blocks`."""

    rows: int
    keys: int
    warp_rows: int
    stages: int = 1
    blocks: int = 1
    resident: bool = False

    def __str__(self) -> str:
        stays = ", Q in registers" if self.resident else ""
        return (
            f"{self.rows}x{self.keys}, {self.rows // self.warp_rows} warps of {self.warp_rows} rows, "
            f"{self.stages} stages, {self.blocks} blocks{stays}"
        )


class Facts(NamedTuple):
    """What rows of the table ask for.

    `widest` of D and Dv on chip; `few`: queries' rows do not fill more than the smallest tile; `mask`: which keys they
    see.
    """

    widest: int
    few: bool
    mask: MaskKind


FILE = Path(__file__).with_name("tables.json")
SHAPES: Table[Shape] = table(FILE, "forward", lambda says: Shape(**says))


def forward_tiling(problem: Problem, program: Program, target: Target) -> WarpTiling:
    """Tiles of the forward kernel: the first row of the table that is of such calls and fits in shared memory."""
    return _chosen(problem, program, target)[0]


def forward_words(problem: Problem, program: Program, target: Target) -> str:
    """What says so, for people to read."""
    return f"{mods_of(program).value}; {_chosen(problem, program, target)[1]}"


def _chosen(problem: Problem, program: Program, target: Target) -> tuple[WarpTiling, Evidence]:
    heads = packed_heads(problem, program, FEW)
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    # the keys of a tile may not depend on how many queries there are where bits may not
    few = queries(problem) * slots(heads) <= FEW and not problem.schedule.batch_invariant
    facts = Facts(max(d, dv), few, mask_of(problem, program))
    tilings = ((shaped(row.says, d, dv, heads, problem), row.evidence) for row in SHAPES if matches(facts, row.pattern))
    return next((tiling, evidence) for tiling, evidence in tilings if fits(tiling, target))


def fits(tiling: WarpTiling, target: Target) -> bool:
    """Whether threads copy whole tiles, and an SM holds as many blocks as the tiling wants, with what each reserves."""
    of_a_block = tiling.shared_memory(element_bytes=2) + RESERVED
    return tiling.copies_are_whole and tiling.blocks * of_a_block <= target.shared_memory + RESERVED


def shaped(shape: Shape, d: int, dv: int, heads: int, problem: Problem) -> WarpTiling:
    """The tiling of a shape, for D and Dv on chip and so many packed heads."""
    return WarpTiling(
        tile_m=shape.rows,
        tile_n=shape.keys,
        d=d,
        dv=dv,
        warp_rows=shape.warp_rows,
        stages=shape.stages,
        blocks=shape.blocks,
        resident=shape.resident,
        packed_heads=heads,
        heads_together=problem.schedule.heads_together,
        scheduler=Scheduler.STRIDE if problem.schedule.persistent else Scheduler.ONE_TILE,
    )
