"""Sums along the diagonals of a warp's 16 columns: a lane's own in registers, those of other lanes in shared memory.

Lane 4 b + a holds columns b and b + 8 and rows 8 j + 2 a + e, e = 0, 1. What it has on a diagonal it sums first: two
numbers at most, for diagonal 8 n + 2 a + e - b with n = j - c. The four lanes of a `b` then hold a line of numbers,
one for each 8 n + 2 a + e, and lines of other `b` are the same moved by one: the sum of a diagonal d is the sum over
the eight lines at d + b. So the lines go to shared memory, two neighbours a store, between zeros, and come back one
diagonal a lane, from addresses that differ by constants. Against moving all lines to b = 0 by shuffles (58 of them,
and as many selections and sums, and 20 reductions of 4 lanes): 11 stores, 24 loads, 3 reductions of 32 lanes.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from .score_tile import FragmentShape
from .values import Fixed

LINES = 8
FIRST = -15  # the lowest diagonal, row minus column from those of lane 0


class Diagonals(Fixed):
    """One warp's lines, its part of each of the `LINES` rows of `floats` numbers from `start` that all warps share."""

    def __init__(self, start: cute.Pointer, floats: int, warp: Any, warps: int) -> None:
        self.lane = cute.arch.lane_idx()
        self.pitch = floats // LINES
        self.width = self.pitch // warps
        self.mine = start + warp * self.width

    def _line(self, b: Any) -> Any:
        """Where the line of `b` begins: 8 b banks further than the first, so that 16 lanes store without conflict."""
        return b * self.pitch + 8 * (b & 3)

    def put(self, shape: FragmentShape, values: list[list[Any]]) -> None:
        """This lane's part of the lines of `values[row][column]`; seen by the warp after it, or the block, met."""
        groups = shape.rows // 2
        assert shape.column_offsets == (0, 8)
        assert shape.row_offsets == tuple(8 * (r // 2) + r % 2 for r in range(shape.rows))
        assert 8 * groups + 48 <= self.width and self.pitch % 32 == 0
        cute.arch.sync_warp()  # all lanes have read what was put before
        start = self.mine + (self._line(self.lane >> 2) + (self.lane & 3) * 2)
        start = cute.make_ptr(Float32, start.toint(), cute.AddressSpace.smem, assumed_align=8)
        for n in range(-2, groups + 1):
            pair = cute.make_rmem_tensor(2, Float32)
            for e in range(2):
                parts = [values[2 * (n + c) + e][c] for c in range(2) if 0 <= n + c < groups]
                pair[e] = parts[0] + parts[1] if len(parts) == 2 else parts[0] if parts else Float32(0.0)
            cute.autovec_copy(pair, cute.make_tensor(start + 8 * (n + 2), cute.make_layout(2)))

    def of_lanes(self, shape: FragmentShape) -> list[tuple[int, int]]:
        """(diagonal of lane 0, how many lanes have one): lane l sums the `l`-th from there."""
        count = 8 * (shape.rows // 2) - FIRST
        return [(FIRST + n, min(32, count - n)) for n in range(0, count, 32)]

    def sum(self, first: int) -> Any:
        """The sum of diagonal `first` + this lane's number; lanes that `of_lanes` does not count get anything."""
        total: Any = None
        for b in range(LINES):
            place = self.mine + (self.lane + (self._line(b) + first + b + 16))
            value = cute.make_tensor(place, cute.make_layout(1))[0]
            total = value if total is None else total + value
        return total
