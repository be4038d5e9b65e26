"""What a block has of a query tile whose scores and outputs lie in memory of the tensor core, for each of its rows."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .....primitives.pipelines import Slot
from .....primitives.values import Fixed
from .matrix_memory import MatrixMemory


def of_tile(tile: Any) -> Slot:
    """The one stage that a query tile has of an edge."""
    return Slot(1, Int32(tile), Int32(0))


class QueryTile(Fixed):
    """A thread of a group that has the `rows` of query tile `number`, one a thread: its row, its lane of the memory.

    A place is where the tile's scores are, `tile_n` columns; of each there are factors, of each tile sums.
    """

    def __init__(self, block: Any, memory: MatrixMemory, number: Any, thread: Any, rows: int):
        self.block, self.tiling, self.memory, self.number = block, block.tiling, memory, number
        self.lane, self.row, self.rows = cute.arch.lane_idx(), thread, rows

    def scores(self, place: Slot) -> Any:
        """The column where the scores of a place begin, and its probabilities."""
        return place.index * self.tiling.tile_n

    def output(self) -> Any:
        return self.tiling.first_output + self.number * self.tiling.dv

    def factor(self, place: Slot) -> cute.Tensor:
        """(1,)"""
        return cute.make_tensor(self.block.row_factors + (place.index * self.rows + self.row), cute.make_layout(1))

    def sum(self) -> cute.Tensor:
        """(1,)"""
        return cute.make_tensor(self.block.row_sums + (self.number * self.rows + self.row), cute.make_layout(1))
