"""A backward that computes P and dS where products lie in memory of the tensor core, and a thread has a query."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from .....primitives.pipelines import Slot
from .....primitives.score_tile import FragmentShape
from .....primitives.values import narrowed
from ..key_tile import RowStatistic
from ..rounding import put_row
from .key_rows import COLUMNS, KeyRows
from .matrix_memory import MatrixMemory


class QueryLanes(KeyRows):
    """A group of `THREADS` with a tile's queries, one a thread, and its part of the keys; dK and dV are transposed.

    P, and then dS, go to one place in shared memory. `block` says by its edge `room` when P has been read there, and,
    empty, when dS has.
    """

    def __init__(self, kernel: Any, block: Any, memory: MatrixMemory, thread: Any, shape: FragmentShape):
        super().__init__(kernel, block, memory, thread, shape)
        self.row, self.apart = self.thread, self.tiling.keys
        self.first_column = self.number * self.tiling.keys

    def first_key(self, first: Any) -> Any:
        return first

    def step(self, call: Any, m: Any, tested: Boolean, q_slot: Slot, slot: Slot) -> None:
        """One query tile."""
        block, mods, memory, columns = self.block, self.mods, self.memory, self.tiling.columns
        values = cute.make_rmem_tensor((1, self.tiling.keys), Float32)
        gradients = cute.make_rmem_tensor((1, self.tiling.keys), Float32)
        at = mods.evaluator(self.tile(values, m))
        mods.read_ahead(at)
        lse, delta = [
            RowStatistic(of[None, q_slot.index].iterator + self.row, self.shape, together=1)
            for of in (block.sLse, block.sDelta)
        ]
        block.q_edge.wait(q_slot)
        block.scores.wait(slot)
        memory.heard()
        self.fetch(values, columns.scores)
        if const_expr(mods.backward.one_pass):
            block.gradients.wait(slot)
            memory.heard()
            self.fetch(gradients, columns.gradients)
            mods.drop(at, gradients)
            mods.both(at, lse, gradients, delta, tested)
        else:
            mods.probabilities(at, lse, tested)
        block.room.wait_empty(slot)
        self.hand_over(mods.dropped(at, values, lambda values: values), block.probabilities, slot)
        if const_expr(not mods.backward.one_pass):
            block.gradients.wait(slot)
            memory.heard()
            self.fetch(gradients, columns.gradients)
            mods.drop(at, gradients)
            mods.score_gradients(at, gradients, delta)
        block.room.wait(slot)
        self.hand_over(gradients, block.scores_done, slot)
        mods.sum_captured(at, gradients, self.diagonals)()

    def fetch(self, values: cute.Tensor, columns: Any) -> None:
        """This thread's part of its row."""
        for c, value in enumerate(self.memory.read(columns.first + self.first_column, self.tiling.keys)):
            values[0, c] = value

    def hand_over(self, values: cute.Tensor, edge: Any, slot: Slot) -> None:
        """Its part, rounded, to shared memory; says that it is there, and that it has read what it came from."""
        put_row(narrowed(values, self.block.dtype), self.block.sdS, self.thread, self.first_column)
        cute.arch.fence_view_async_shared()
        self.memory.have_read()
        cute.arch.sync_warp()
        edge.fill(slot, self.lane)

    # --- the end of a tile ------------------------------------------------------------------------------------

    def keys(self, call: Any) -> Any:
        """The keys as they were at the start: reading them again spilled 6 for documents of packed sequences."""
        return self.work.keys

    def put(self, shared: cute.Tensor, sums: cute.Tensor, first: int) -> None:
        column, key, lanes = self._place(first, cute.size(shared, mode=[1]))
        _put_column_if(lanes, shared, sums, key, column)

    def leave(self, target: cute.Tensor, sums: cute.Tensor, first: int, width: int) -> None:
        """To a line of the piece for each key."""
        column, key, lanes = self._place(first, width)
        lines = cute.make_tensor(target.iterator, cute.make_layout((self.tiling.tile_n, width), stride=(width, 1)))
        _put_column_if(lanes, lines, sums, key, column)

    def _place(self, first: int, width: int) -> tuple[Any, int, Boolean]:
        """(column of a row of dK or dV, first key, whether this thread has it) of `COLUMNS` of the unit's memory."""
        product, key = divmod(first, self.tiling.tile_n)
        start, lane = self.tiling.columns.lane_columns(width)[product]
        return start + self.thread, key, self.thread >= lane


@cute.jit
def _put_column_if(condition: Boolean, target: cute.Tensor, sums: cute.Tensor, key: int, column: Any):
    if condition:
        for i in range(COLUMNS):
            target[key + i, column] = sums[i]


__all__ = ["QueryLanes"]
