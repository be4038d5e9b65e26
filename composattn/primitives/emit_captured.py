"""Gradients of captured tensors from a tile of dS: summed in registers along the pattern, then added to memory.

Sums in memory are 64-bit fixed point (`composattn.analysis.captured_gradient`), so their order is free. Which lanes of
a warp share a row or a column, and who of them adds their sum, the fragment says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import add
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..analysis.captured_gradient import FusedRead, GradientProgram, Pattern
from ..graph.expr import Capture, DType, Rate
from .diagonals import Diagonals
from .emit import Evaluator
from .emit_ops import convert
from .lane_diagonals import LaneDiagonals
from .lanes import LANES, WARP, a_lane_each, first_of, over_lanes
from .score_tile import ROW_PER_LANE, FragmentShape, ScoreTile
from .values import choose, larger, smaller

AnyDiagonals = Diagonals | LaneDiagonals
MOST_ROWS, FEW_ROWS = 32, 8
_ONE = FragmentShape((0,), (0,), ROW_PER_LANE)


class CapturedSums:
    """The reads of a plan with a gradient to sum, and where their sums and units lie among the captured tensors."""

    def __init__(self, program: GradientProgram, slot: dict[Capture, int]) -> None:
        self.reads = [
            (read, slot[capture], slot[program.totals[capture]], number)
            for number, (capture, reads) in enumerate(program.reads.items())
            for read in reads
        ]
        self.units = slot[program.units]

    def add(self, at: Evaluator, ds: cute.Tensor, diagonals: AnyDiagonals | None) -> Callable[[], None]:
        """Adds what the tile's dS give; to be called by whole warps.

        What the last read by distance gives waits in `diagonals` (needed where there is one) for a call of what is
        returned: its loads and additions can run under something else.
        """
        rest: Callable[[], None] = _nothing
        for read, tensor, total, number in self.reads:
            captured = at.leaves.captured
            unit, add_to = captured[self.units][number], captured[total].iterator
            every = range(at.tile.rows)
            if read.pattern is Pattern.DISTANCE:
                values = _values(read, at, ds, every)
                assert diagonals is not None
                rest()
                diagonals.put(values)
                rest = functools.partial(_add_diagonals, read, at, diagonals, captured[tensor], add_to, unit)
                continue
            for rows in _runs(at.tile.shape, read.pattern):
                where, sums, holds = _PATTERNS[read.pattern](read, at, _values(read, at, ds, rows), rows)
                flat = [_flat(captured[tensor], indices) for indices in where]
                _add_if(Boolean(holds), add_to, flat, [s * unit for s in sums])
        return rest


def _nothing() -> None:
    pass


def _add_diagonals(
    read: FusedRead, at: Evaluator, diagonals: AnyDiagonals, tensor: cute.Tensor, add_to: Any, unit: Any
) -> None:
    """Adds the sums by distance that were put in `diagonals`, one diagonal per lane."""
    cute.arch.sync_warp()
    tile, lane = at.tile, cute.arch.lane_idx()
    starts = diagonals.of_lanes()
    # positions follow the distance alone: asked at the row that is the distance, and column 0
    first_q, first_kv = tile.first_q - tile.shape.lane_row(lane), tile.first_kv - tile.shape.lane_column(lane)
    distance = first_q - first_kv + lane
    shape = FragmentShape(tuple(first for first, _ in starts), (0,), ROW_PER_LANE)
    along = Evaluator(at.mods, at.leaves, ScoreTile(shape, None, tile.b, tile.h, distance, Int32(0)))
    along.head = dict(at.head)
    for r, (first, lanes) in enumerate(starts):
        holds = True if lanes == 32 else lane < lanes
        flat = _flat(tensor, _positions(read, along, r, 0))
        _add_if(Boolean(holds), add_to, [flat], [diagonals.sum(first) * unit])


def _runs(shape: FragmentShape, pattern: Pattern) -> list[range]:
    """Rows whose sums are in registers together: of many a few, as 64 with their places spilled 114.

    As many as there are lanes where these share rows: then each lane has the place of one.
    """
    rows = range(shape.rows)
    if pattern not in _BY_ROWS or len(rows) <= MOST_ROWS:
        return [rows]
    few = LANES if pattern is Pattern.ROW and _all_lanes_share(shape.row_offsets, shape.row_moves) else FEW_ROWS
    return [rows[n : n + few] for n in range(0, len(rows), few)]


def _all_lanes_share(offsets: tuple[int, ...], moves: tuple[int, ...]) -> bool:
    """Whether no lane moves rows (or columns) that are neighbours, whole runs of as many as there are lanes."""
    return not any(moves) and len(offsets) % LANES == 0 and offsets == tuple(range(len(offsets)))


def _values(read: FusedRead, at: Evaluator, ds: cute.Tensor, rows: range) -> list[list[Any]]:
    """The gradient of the read at each of `rows` and each column."""
    found = []
    for r in rows:
        row = []
        for c in range(at.tile.columns):
            value = ds[r, c]
            if read.factor is not None:
                factor = convert(at.value(read.factor, r, c), DType.FLOAT)
                value = value * factor
                if read.factor.rate is Rate.ELEMENT:
                    value = choose(ds[r, c] == 0.0, Float32(0.0), value)
                at.forget_element()
            row.append(value)
        found.append(row)
    return found


Sums = tuple[list[list[Any]], list[Any], Any]
"""Positions, the sums that belong there, and whether this lane holds them."""


def _by_head(read: FusedRead, at: Evaluator, values: list[list[Any]], rows: range) -> Sums:
    total = over_lanes(add, _total([x for row in values for x in row]), WARP)
    return [_positions(read, at, 0, 0)], [total], first_of(cute.arch.lane_idx(), WARP)


def _by_column(read: FusedRead, at: Evaluator, values: list[list[Any]], rows: range) -> Sums:
    shape, columns = at.tile.shape, range(at.tile.columns)
    own = (_total([row[c] for row in values]) for c in columns)
    if len(columns) == LANES and _all_lanes_share(shape.column_offsets, shape.column_moves):
        return _one_each(read, at, list(own), 0, cute.arch.lane_idx())
    sums = [shape.along_column(add, x) for x in own]
    return [_positions(read, at, 0, c) for c in columns], sums, shape.first_in_column(cute.arch.lane_idx())


def _by_row(read: FusedRead, at: Evaluator, values: list[list[Any]], rows: range) -> Sums:
    shape = at.tile.shape
    own = (_total(row) for row in values)
    if len(rows) == LANES and _all_lanes_share(shape.row_offsets, shape.row_moves):
        return _one_each(read, at, list(own), cute.arch.lane_idx() + rows[0], 0)
    sums = [shape.along_row(add, x) for x in own]
    return [_positions(read, at, r, 0) for r in rows], sums, shape.first_in_row(cute.arch.lane_idx())


def _one_each(read: FusedRead, at: Evaluator, own: list[Any], row: Any, column: Any) -> Sums:
    """Where all lanes have some of each sum, a lane gets one; its place is `row` and `column` from the tile's first."""
    tile = at.tile
    place = ScoreTile(_ONE, None, tile.b, tile.h, tile.first_q + row, tile.first_kv + column)
    there = Evaluator(at.mods, at.leaves, place)
    there.head = dict(at.head)
    return [_positions(read, there, 0, 0)], [a_lane_each(own)], True


def _by_pair(read: FusedRead, at: Evaluator, values: list[list[Any]], rows: range) -> Sums:
    where = []
    for r in rows:
        for c in range(at.tile.columns):
            where.append(_positions(read, at, r, c))
            at.forget_element()
    return where, [x for row in values for x in row], True


_PATTERNS = {
    Pattern.HEAD: _by_head,
    Pattern.ROW: _by_row,
    Pattern.COLUMN: _by_column,
    Pattern.PAIR: _by_pair,
}
_BY_ROWS = (Pattern.ROW, Pattern.PAIR)


def _positions(read: FusedRead, at: Evaluator, r: int, c: int) -> list[Any]:
    return [at.value(a, r, c) for a in read.leaf.args]


def _total(values: list[Any]) -> Any:
    return functools.reduce(add, values)


def _flat(tensor: cute.Tensor, indices: list[Any]) -> Any:
    """Position in a contiguous tensor of this shape; out of range as reads are: from the end, or clamped."""
    flat: Any = Int32(0)
    for mode, i in enumerate(indices):
        size = Int32(tensor.shape[mode])
        if isinstance(i, Int64):
            i = Int32(smaller(larger(i, Int64(-(2**31))), Int64(2**31 - 1)))
        i = Int32(i)
        i = choose(i < 0, i + size, i)
        flat = flat * size + smaller(larger(i, 0), size - 1)
    return flat


@cute.jit
def _add_if(condition: Boolean, start: cutlass.Constexpr, flat: cutlass.Constexpr, sums: cutlass.Constexpr):
    if condition:
        for where, value in zip(flat, sums, strict=True):
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.add.u64 [{$r0}], {$r1};", read_only_args=[start + where, value.to(Int64)]
            )
