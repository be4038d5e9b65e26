"""Gradients of captured tensors from a tile of dS: summed in registers along the pattern, then added to memory.

Sums in memory are 64-bit fixed point, so their order does not matter (`composattn.graph.captured_gradient`). A thread
holds columns (keys) 0 and 8 and rows (queries) 8 j + e, e = 0, 1, from its first ones; of the lanes of a warp, lane
4 b + a begins at column b and row 2 a.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..graph.captured_gradient import FusedRead, GradientProgram, Pattern
from ..graph.expr import Capture, DType, Rate
from .emit import Evaluator
from .emit_ops import convert
from .score_tile import FragmentShape, ScoreTile
from .values import choose, larger, smaller


class CapturedSums:
    """The reads of a plan with a gradient to sum, and where their sums and units lie among the captured tensors."""

    def __init__(self, program: GradientProgram, slot: dict[Capture, int]) -> None:
        self.reads = [
            (read, slot[capture], slot[program.totals[capture]], number)
            for number, (capture, reads) in enumerate(program.reads.items())
            for read in reads
        ]
        self.units = slot[program.units]

    def add(self, at: Evaluator, ds: cute.Tensor) -> None:
        """Adds what the tile's dS give; to be called by whole warps."""
        for read, tensor, total, number in self.reads:
            captured = at.leaves.captured
            unit = captured[self.units][number]
            values = _values(read, at, ds)
            where, sums, holds = _PATTERNS[read.pattern](read, at, values)
            flat = [_flat(captured[tensor], indices) for indices in where]
            _add_if(holds, captured[total].iterator, flat, [s * unit for s in sums])


def _values(read: FusedRead, at: Evaluator, ds: cute.Tensor) -> list[list[Any]]:
    """The gradient of the read at each row and column."""
    found = []
    for r in range(at.tile.rows):
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


def _by_head(read: FusedRead, at: Evaluator, values: list[list[Any]]) -> Sums:
    total = _over_lanes(_total([x for row in values for x in row]), (1, 2, 4, 8, 16))
    return [_positions(read, at, 0, 0)], [total], cute.arch.lane_idx() == 0


def _by_column(read: FusedRead, at: Evaluator, values: list[list[Any]]) -> Sums:
    columns = range(at.tile.columns)
    sums = [_over_lanes(_total([row[c] for row in values]), (1, 2)) for c in columns]
    return [_positions(read, at, 0, c) for c in columns], sums, cute.arch.lane_idx() % 4 == 0


def _by_row(read: FusedRead, at: Evaluator, values: list[list[Any]]) -> Sums:
    sums = [_over_lanes(_total(row), (4, 8, 16)) for row in values]
    return [_positions(read, at, r, 0) for r in range(at.tile.rows)], sums, cute.arch.lane_idx() < 4


def _by_pair(read: FusedRead, at: Evaluator, values: list[list[Any]]) -> Sums:
    where = []
    for r in range(at.tile.rows):
        for c in range(at.tile.columns):
            where.append(_positions(read, at, r, c))
            at.forget_element()
    return where, [x for row in values for x in row], Boolean(True)


def _by_distance(read: FusedRead, at: Evaluator, values: list[list[Any]]) -> Sums:
    """Sums along the diagonals of a warp's 16 columns, in lanes 0 to 3.

    Row minus column, from those of lane 0, is 8 (j - c) + (2 a + e) - b. The part 2 a + e - b stays below 8 and above
    -8; it moves to lanes with b = 0 in three steps, one a bit of b. Each moves 4, 2 or 1 diagonals down: to the lane
    with an `a` lower by 2 or 1, or to the other e, and where `a` has no lower one, to the highest of the 8 below.
    """
    shape = at.tile.shape
    groups = shape.rows // 2
    assert shape.column_offsets == (0, 8)
    assert shape.row_offsets == tuple(8 * (r // 2) + r % 2 for r in range(shape.rows))
    lane = cute.arch.lane_idx()
    a = lane % 4
    # sums[n][e] belongs to the diagonal 8 (n - 2) + 2 a + e - b
    sums: list[list[Any]] = [[Float32(0.0)] * 2 for _ in range(groups + 2)]
    for r in range(shape.rows):
        for c in range(2):
            n, e = r // 2 - c + 2, r % 2
            sums[n][e] = sums[n][e] + values[r][c]

    def moved(source: Any, e: int, carries: Any) -> list[Any]:
        got = [cute.arch.shuffle_sync(s[e], source) for s in sums] + [Float32(0.0)]
        return [choose(carries, above, same) for same, above in pairwise(got)]

    for source, carries in (
        ((lane ^ 18), a >= 2),
        (((lane ^ 8) & ~3) | ((lane + 1) & 3), a == 3),
    ):
        parts = [moved(source, e, carries) for e in range(2)]
        sums = [[s[e] + parts[e][n] for e in range(2)] for n, s in enumerate(sums)]
    below = [cute.arch.shuffle_sync(s[1], lane ^ 4) for s in sums]
    beside = moved(((lane ^ 4) & ~3) | ((lane + 1) & 3), 0, a == 3)
    sums = [[s[0] + below[n], s[1] + beside[n]] for n, s in enumerate(sums)]
    offsets = tuple(8 * (n - 2) + e for n in range(groups + 2) for e in range(2))
    tile = at.tile
    # positions follow the distance alone: asked at the row that is the distance, and column 0
    line = ScoreTile(
        FragmentShape(offsets, (0,), 1), None, tile.b, tile.h, tile.first_q - tile.first_kv, Int32(0)
    )
    along = Evaluator(at.mods, at.leaves, line)
    along.head = dict(at.head)
    where = [_positions(read, along, r, 0) for r in range(len(offsets))]
    return where, [x for pair in sums for x in pair], lane < 4


_PATTERNS = {
    Pattern.HEAD: _by_head,
    Pattern.ROW: _by_row,
    Pattern.COLUMN: _by_column,
    Pattern.DISTANCE: _by_distance,
    Pattern.PAIR: _by_pair,
}


def _positions(read: FusedRead, at: Evaluator, r: int, c: int) -> list[Any]:
    return [at.value(a, r, c) for a in read.leaf.args]


def _total(values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _over_lanes(value: Any, distances: tuple[int, ...]) -> Any:
    for distance in distances:
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
    return value


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


__all__ = ["CapturedSums"]
