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
from ..fused.planning.call_class import BEYOND, CallClass, MaskKind, class_of
from ..fused.tiles.patterns import Pattern, Span, matches
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
from .tiling import ROWS

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
NARROW, BROAD = Span(0, LANES), Span(LANES, BEYOND)
BOUNDED = MaskKind.NONE, MaskKind.ENDS, MaskKind.BOUNDS, MaskKind.RUNS  # no lists, nor tensors, say what a tile visits
# (one block, two, of which calls): of D 64 and 96 no two
KINDS: tuple[tuple[Kind, Kind, Pattern], ...] = (
    (ONE, PAIR, {"d": (128,), "dv": (128,), "mask": BOUNDED, "seen": Span(256, BEYOND)}),
    (ONE, ONE, {"widest": NARROW}),
    (WIDE, WIDE, {"length": Span(0, LANES)}),  # one tile of queries
    (WIDE, WIDE_PAIR, {"d": Span(128, 192), "dv": NARROW, "mask": BOUNDED}),
    (WIDE, WIDE_PAIR, {"d": NARROW, "dv": Span(128, 192), "mask": BOUNDED}),
    (WIDE, QUERY_PAIR, {"mask": BOUNDED}),
    (WIDE, WIDE, {}),
)


class Needs(NamedTuple):
    """What takes registers beside the products."""

    kernel: str
    fixed: bool
    scored: bool
    reads: bool  # at (q, kv)
    curved: bool  # the derivative sees the score, so P and dS are computed at once
    by_row: bool  # sums that are a number a row, or of pairs of packed sequences


class Registers(NamedTuple):
    """Roles, columns of dQ that a thread has at once, and whether it computes half of its queries at a time."""

    roles: BackwardRoles
    columns: int
    in_halves: bool = False


def registers(compute: int, dq: int, other: int, columns: int, in_halves: bool = False) -> Registers:
    return Registers(BackwardRoles(compute, dq, other), columns, in_halves)


YES = (True,)
IN_TURNS: Pattern = {"kernel": ("backward_pair",), "fixed": YES, "scored": YES, "reads": (False,)}
REGISTERS: tuple[tuple[Registers, Pattern], ...] = (
    (registers(192, 72, 56, 64, True), IN_TURNS),  # ALiBi spilled 4
    # all 96 columns of dQ at once, as dP waits for them; with 160 for P and dS a causal mask spilled 12
    (registers(184, 96, 48, 48, True), {"kernel": ("backward_wide_pair",), "reads": YES}),
    (registers(176, 112, 48, 96, True), {"kernel": ("backward_wide_pair",)}),
    # dQ with 64 and 32 columns at once spilled up to 110, with 56 and 16 columns 2 beside sums by distance
    (registers(192, 64, 64, 16, True), {"kernel": ("backward_query_pair",), "scored": YES}),
    (registers(192, 64, 64, 16), {"kernel": ("backward_query_pair",)}),
    # products of more addresses: with 64 they spilled 38; a soft cap in a fixed order 46, a third of them in dQ
    (registers(136, 112, 128, 64), {"kernel": ("backward_wide",), "curved": YES}),
    (registers(144, 96, 128, 64), {"kernel": ("backward_wide",)}),
    (registers(208, 48, 48, 32), {"by_row": YES}),  # with 192 they spilled 2
    (registers(184, 80, 64, 32), {"reads": YES}),  # a gradient by pairs spilled 38
    (registers(176, 96, 64, 64, True), {"scored": YES}),  # ALiBi by a function spilled 4
    (registers(176, 96, 64, 64), {}),
)


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
    one, two = next((one, two) for one, two, pattern in KINDS if matches(call, pattern))
    return two if shares(two, program) else one


def shares(kind: Kind, program: Program) -> bool:
    """Whether registers do for it: by distance where the derivative sees the score two blocks spilled 44."""
    along = kind.tiling.sharing > 1 and sees_score(program) and sums_by(program, Sums.DISTANCE)
    return not along and not any(sums_by(program, pattern) for pattern in kind.unpaired)


def _registers(kind: Kind, call: CallClass, program: Program) -> Registers:
    packed = call.layout == "packed" and sums_by(program, Sums.PAIR)
    needs = Needs(
        kind.tiling.kernel, call.order == "fixed", program.score is not None, reads_pairs(program.score),
        sees_score(program), sums_by(program, Sums.ROW) or packed,
    )  # fmt: skip
    return next(found for found, pattern in REGISTERS if matches(needs, pattern))


def _dims(kind: Kind, call: CallClass) -> tuple[int, int]:
    """Narrower rows than the tile's are padded."""
    if kind is QUERY_PAIR:
        return 256, 256
    wide = call.widest > LANES
    return (max(LANES, -(-call.d // 64) * 64), max(LANES, -(-call.dv // 64) * 64)) if wide else (call.d, call.dv)


def distances_of(count: int) -> int:
    """Numbers through which sums by distance pass, of a thread's `count` scores."""
    return GROUPS * WARPGROUP * (count // RUN) * (count + 32)
