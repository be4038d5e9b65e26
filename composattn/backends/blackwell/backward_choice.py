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
from ..fused.tiles.traits import reads_pairs, sees_score, sums_by
from .backward_tiling import (
    BlackwellBackwardTiling,
    BlackwellPairBackwardTiling,
    QueryPairTiling,
    WideBackwardTiling,
    WidePairBackwardTiling,
)
from .roles import WARPGROUP, BackwardRoles
from .tensor_memory import GROUPS, LANES, STRIP
from .tiling import FILE, ROWS

RUN = 16  # scores of a thread that are a chain of sums by distance, see `primitives.lane_diagonals`
L2 = 64 << 20


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kernel: `changes` of its tiles, of which the first that fits is taken, and `scores` of a thread in a row.

    `unpaired`: gradients of captured tensors for whose sums it has no registers.
    """

    tiling: type[BlackwellBackwardTiling]
    tile_m: int
    tile_n: int
    scores: int
    changes: tuple[dict[str, int], ...]
    unpaired: tuple[Sums, ...] = ()


SMALLER = tuple(
    {"q_stages": q, "do_stages": do, "dq_part": part}
    for q, do, part in ((2, 2, 32), (2, 1, 32), (2, 1, 16), (1, 2, 32), (1, 1, 32), (1, 1, 16), (1, 1, 8))
)
IN_PARTS = tuple({"q_stages": 1, "do_stages": 1, "dq_part": part} for part in (32, 24, 16, 8))
STREAMED = tuple({"q_stages": 2, "do_stages": 2, "dq_part": 16, "stages": stages} for stages in (4, 3))
ONE = Kind(BlackwellBackwardTiling, ROWS, ROWS, ROWS // GROUPS, SMALLER)
WIDE = Kind(WideBackwardTiling, ROWS, ROWS // 2, ROWS // 2 // GROUPS, SMALLER)
PAIR = Kind(BlackwellPairBackwardTiling, ROWS, 2 * ROWS, ROWS // GROUPS, IN_PARTS, (Sums.ROW, Sums.PAIR))
WIDE_PAIR = Kind(WidePairBackwardTiling, ROWS, 2 * ROWS, STRIP, IN_PARTS, (Sums.ROW, Sums.PAIR))
# by head 30 spilled, by column 34
QUERY_PAIR = Kind(
    QueryPairTiling, 2 * ROWS, ROWS, ROWS // GROUPS, STREAMED, (Sums.HEAD, Sums.ROW, Sums.COLUMN, Sums.PAIR)
)
KINDS = {"one": ONE, "wide": WIDE, "pair": PAIR, "wide pair": WIDE_PAIR, "query pair": QUERY_PAIR}
# of one block, and of two
TABLE: Table[tuple[Kind, Kind]] = table(FILE, "kinds", lambda said: (KINDS[said[0]], KINDS[said[1]]))


class Registers(NamedTuple):
    """Roles, columns of dQ that a thread has at once, and whether it computes half of its queries at a time."""

    roles: BackwardRoles
    columns: int
    in_halves: bool = False

    @staticmethod
    def of(said: dict[str, Any]) -> Registers:
        roles = BackwardRoles(said["compute"], said["dq"], said["other"])
        return Registers(roles, said["columns"], said.get("in_halves", False))


REGISTERS: Table[Registers] = table(FILE, "registers", Registers.of)


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> BlackwellBackwardTiling:
    """Tiles of the backward kernel: they fill shared and tensor memory."""
    call = class_of(problem, program, target, "backward", rows=ROWS, deterministic=deterministic)
    kind = kind_of(call, program)
    roles, columns, in_halves = _registers(kind, call, program)
    d, dv = _dims(kind, call)
    fixed: dict[str, Any] = {
        "kernel": kind.tiling.kernel, "tile_m": kind.tile_m, "tile_n": kind.tile_n, "d": d, "dv": dv, "l2": L2,
        "dq_at_once": min(columns, d // kind.tiling.sharing), "roles": roles, "in_halves": in_halves,
        "distances": distances_of(kind.scores) if sums_by(program, Sums.DISTANCE) else 0,
        "heads_together": problem.schedule.heads_together,
    }  # fmt: skip
    whole = (c for c in kind.changes if kind is QUERY_PAIR or d // kind.tiling.sharing % c["dq_part"] == 0)
    tilings = (kind.tiling(**(fixed | changes)) for changes in whole)
    return next(t for t in tilings if t.shared_memory(2) <= target.shared_memory)


def backward_words(problem: Problem, program: Program, target: Target, deterministic: bool) -> str:
    """The class of a call, and that nobody measured what it gets, for people to read."""
    call = class_of(problem, program, target, "backward", rows=ROWS, deterministic=deterministic)
    return f"{call}\n    {kind_of(call, program).tiling.kernel}; not measured: no device has timed it"


def kind_of(call: CallClass, program: Program) -> Kind:
    """The kernel of one block for a tile of keys, or of two."""
    one, two = first(TABLE, call)
    return two if shares(two, program) else one


def shares(kind: Kind, program: Program) -> bool:
    """Whether registers do for it: by distance where the derivative sees the score two blocks spilled 44."""
    along = sees_score(program) and sums_by(program, Sums.DISTANCE)
    return not along and not any(sums_by(program, pattern) for pattern in kind.unpaired)


def _registers(kind: Kind, call: CallClass, program: Program) -> Registers:
    """`curved`: the derivative sees the score, so P and dS are computed at once."""
    of_pairs = call.layout == "packed" and sums_by(program, Sums.PAIR)
    return first(
        REGISTERS, call, kernel=kind.tiling.kernel, fixed=call.order == "fixed", scored=program.score is not None,
        reads=reads_pairs(program.score), curved=sees_score(program), by_row=sums_by(program, Sums.ROW) or of_pairs,
    )  # fmt: skip


def _dims(kind: Kind, call: CallClass) -> tuple[int, int]:
    """Narrower rows than the tile's are padded."""
    if kind is QUERY_PAIR:
        return 256, 256
    wide = call.widest > LANES
    return (max(LANES, -(-call.d // 64) * 64), max(LANES, -(-call.dv // 64) * 64)) if wide else (call.d, call.dv)


def distances_of(count: int) -> int:
    """Numbers through which sums by distance pass, of a thread's `count` scores."""
    return GROUPS * WARPGROUP * (count // RUN) * (count + 32)
