"""Sums along the diagonals of a warp's part of a tile whose lanes have a column each, or a row: they go lane to lane.

Of columns: a lane's next row lies on the diagonal of the next lane's column. So each lane adds its number of a row to
what the lane before it had summed, and gets that by a shuffle. The first lane begins a diagonal with each row, the last
one ends one, which goes to shared memory. Rows are taken in runs, so that the chains of additions are short and
independent; a run's sums are a line of shared memory, between zeros, and the sum of a diagonal is one of all lines. Of
rows: all the same with rows and columns exchanged, and diagonals counted the other way.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from .branches import when
from .lanes import LANES
from .score_tile import ROW_PER_LANE, FragmentShape
from .values import Fixed, choose

RUN = 16  # rows of a chain


class LaneDiagonals(Fixed):
    """One warp's lines, its part of the `floats` numbers from `start` on that all warps share; as `Diagonals`.

    Diagonals are rows less columns, both from those of lane 0.
    """

    def __init__(self, shape: FragmentShape, start: cute.Pointer, floats: int, warp: Any, warps: int) -> None:
        self.has_rows = shape.lanes == ROW_PER_LANE  # else columns
        of_columns = shape.transposed if self.has_rows else shape
        assert of_columns.transposed.lanes == ROW_PER_LANE and of_columns.column_offsets == (0,)
        assert of_columns.row_offsets == tuple(range(of_columns.rows)) and of_columns.rows % RUN == 0
        self.count, self.lane = of_columns.rows, cute.arch.lane_idx()
        self.lines, self.pitch = self.count // RUN, self.count + LANES
        assert self.lines * self.pitch <= floats // warps
        self.mine = start + warp * (floats // warps)

    def clear(self) -> None:
        """The zeros between which sums are put; once, by the warp."""
        for first in range(0, self.lines * self.pitch, LANES):
            self._put(first + self.lane, Float32(0.0))

    def put(self, values: list[list[Any]]) -> None:
        """The sums of `values[row][column]` of all lanes; seen by the warp after it, or the block, met."""
        mine = [value for row in values for value in row]
        cute.arch.sync_warp()  # all lanes have read what was put before
        for line in range(self.lines):
            place = line * self.pitch + LANES - 1
            total: Any = None
            for r in range(line * RUN, (line + 1) * RUN):
                if total is not None:
                    when(self.lane == LANES - 1, functools.partial(self._put, place + r - LANES, total))
                    before = cute.arch.shuffle_sync_up(total, 1)
                    total = choose(self.lane == 0, Float32(0.0), before) + mine[r]
                else:
                    total = mine[r]
            self._put(place + (line + 1) * RUN - 1 - self.lane, total)

    def _put(self, place: Any, number: Any) -> None:
        cute.make_tensor(self.mine + place, cute.make_layout(1))[0] = number

    def of_lanes(self) -> list[tuple[int, int]]:
        """(diagonal of lane 0, how many lanes have one): lane l sums the `l`-th from there."""
        count = self.count + LANES - 1
        first = 1 - (self.count if self.has_rows else LANES)
        return [(first + n, min(LANES, count - n)) for n in range(0, count, LANES)]

    def sum(self, first: int) -> Any:
        """The sum of diagonal `first` + this lane's number; lanes that `of_lanes` does not count get anything."""
        total: Any = None
        along, first = (-self.lane, -first) if self.has_rows else (self.lane, first)
        for line in range(self.lines):
            place = self.mine + (along + (line * self.pitch + first + LANES - 1))
            value = cute.make_tensor(place, cute.make_layout(1))[0]
            total = value if total is None else total + value
        return total
