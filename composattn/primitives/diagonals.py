"""Sums along the diagonals of a warp's part of a tile: a lane's own in registers, all lanes' through shared memory.

What a lane has on a diagonal it sums first. What lanes of one column hold then is a line of numbers, one for each row
less column of the thread's offsets and the lane's row; lines of other lanes' columns are the same, moved by that
column: the sum of a diagonal d is the sum over the lines of column b at d + b. So the lines go to shared memory,
between zeros, and come back one diagonal per lane, from addresses that differ by constants.

For 64 rows and the 16 columns of a warp in which four lanes share a column, two neighbouring rows each: 11 stores, 24
loads and 3 additions to memory by 32 lanes, against 58 shuffles to move all lines to b = 0, as many selections and
sums, and 20 additions by 4 lanes.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from .lanes import LANES
from .score_tile import FragmentShape
from .values import Fixed, total

WIDEST = 4  # numbers of a store


class Diagonals(Fixed):
    """One warp's lines, its part of each of the `lines` rows of `floats` numbers from `start` that all warps share.

    Diagonals are rows less columns, both from those of lane 0. In a line lie `together` numbers of the first lane, as
    many of the next one, until all lanes of the line had their turn (`run`), and again. Lanes that share no column, or
    whose columns lie apart by other steps than 1, 2, 4, ..., have no such lines.
    """

    def __init__(self, shape: FragmentShape, start: cute.Pointer, floats: int, warp: Any, warps: int) -> None:
        self.shape = shape
        self.lane = cute.arch.lane_idx()
        rows = [move for move in shape.row_moves if move]
        self.lines = 1 << sum(map(bool, shape.column_moves))
        self.together = rows[0] if rows else WIDEST
        self.run = self.together << len(rows)
        own = {r - c for r in shape.row_offsets for c in shape.column_offsets}
        self.first = min(own) - (self.lines - 1)
        self.last = max(own) + sum(rows)
        self.pitch = floats // self.lines
        self.width = self.pitch // warps
        self.mine = start + warp * self.width
        self._check(rows, own)

    def _check(self, rows: list[int], own: set[int]) -> None:
        columns = [move for move in self.shape.column_moves if move]
        assert columns == [1 << n for n in range(len(columns))]
        assert rows == [self.together << n for n in range(len(rows))]
        assert not rows or all(diagonal % self.run < self.together for diagonal in own)
        assert self.run * len(self._runs()) + self._skew(-1) <= self.width and self.pitch % LANES == 0
        beyond = self.of_lanes()[-1][0] + LANES + self.lines - 2  # what the last lane reads, counted or not
        assert beyond - self._before() + self._skew(-1) < self.width

    def _runs(self) -> range:
        """The runs of a line that sums read: its own and zeros on both sides."""
        return range(self.first // self.run, (self.last + self.lines - 1) // self.run + 1)

    def _before(self) -> int:
        """The diagonal with which a line begins."""
        return self.run * self._runs()[0]

    def _skew(self, b: Any) -> Any:
        """How many banks further than the first a line begins, so that what is stored at once is without conflict."""
        return self.run * (b & (LANES // self.run - 1))

    def _line(self, b: Any) -> Any:
        """Where the line of column `b` begins."""
        return b * self.pitch + self._skew(b)

    def put(self, values: list[list[Any]]) -> None:
        """This lane's part of the lines of `values[row][column]`; seen by the warp after it, or the block, met."""
        cute.arch.sync_warp()  # all lanes have read what was put before
        shape = self.shape
        start = self.mine + (self._line(shape.lane_column(self.lane)) + shape.lane_row(self.lane))
        start = cute.make_ptr(Float32, start.toint(), cute.AddressSpace.smem, assumed_align=4 * self.together)
        for n in self._runs():
            numbers = cute.make_rmem_tensor(self.together, Float32)
            for e in range(self.together):
                numbers[e] = self._own(values, n * self.run + e)
            place = start + (self.run * n - self._before())
            cute.autovec_copy(numbers, cute.make_tensor(place, cute.make_layout(self.together)))

    def _own(self, values: list[list[Any]], diagonal: int) -> Any:
        """What this lane has on a diagonal from its own first row and column."""
        columns, rows = enumerate(self.shape.column_offsets), list(enumerate(self.shape.row_offsets))
        found = total(values[r][c] for c, column in columns for r, row in rows if row - column == diagonal)
        return Float32(0.0) if found is None else found

    def of_lanes(self) -> list[tuple[int, int]]:
        """(diagonal of lane 0, how many lanes have one): lane l sums the `l`-th from there."""
        count = self.last + 1 - self.first
        return [(self.first + n, min(LANES, count - n)) for n in range(0, count, LANES)]

    def sum(self, first: int) -> Any:
        """The sum of diagonal `first` + this lane's number; lanes that `of_lanes` does not count get anything."""

        def on_line(b: int) -> Any:
            place = self.mine + (self.lane + (self._line(b) + first + b - self._before()))
            return cute.make_tensor(place, cute.make_layout(1))[0]

        return total(map(on_line, range(self.lines)))
