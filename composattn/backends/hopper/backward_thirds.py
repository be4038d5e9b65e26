"""A Hopper backward that computes dQ of two query tiles at once, see `dq_thirds`."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from ...primitives.pipelines import Abreast, Slot
from ...primitives.values import choose, permuted
from ..fused.kernels.dq_strip_sender import DqStripSender
from ..fused.kernels.dq_thirds import HALF_ROWS, WarpStrips, ds_places, from_halves, is_outer, product_place
from .backward import Consumer, HopperBackward, LastDq
from .wgmma import ROWS, WARPGROUP, product, store_matrix

MATRIX = 16  # queries, of which dS goes to memory at a time
MINE, OTHERS = 1, 2  # products behind a tile: this warpgroup's, or the other one's alone


class HopperBackwardThirds(HopperBackward):
    """Roles as of `HopperBackward`. In two of three steps a warpgroup has a product for dQ."""

    def sender(self, block, number):
        return DqStripSender(self, block, number)

    def consumer(self, block, thread):
        return ThirdsConsumer(self.tiling, block, thread)


class ThirdsConsumer(Consumer):
    """`LastDq.exists` says whose the product behind the last tile is: `MINE`, `OTHERS`, or 0, where none is left."""

    def lay_ds(self, rows):
        self.rows = rows
        scores = product(self.block.dtype, MATRIX)
        self.matrix = cute.make_layout(scores.get_slice(0).partition_shape_C((ROWS, MATRIX)))
        self.put_matrix = store_matrix(scores, self.block.dtype, self.thread, transposed=True)

    def starts(self, slots):
        """With zeros in the place of second tiles: the middle product of a first one alone reads it too."""
        self.put_rows(None, 0, Slot(2, Int32(1), Int32(0)))
        dq_slot, *others = slots
        return dq_slot, Abreast.first([slot.stages for slot in others]), LastDq.none()

    def slots(self, carried):
        """That of dQ goes its own way."""
        dq_slot, rings, last = carried
        return dq_slot, *rings, last

    def put_ds(self, tKrdS, ds_slot):
        """Queries that a short tile lacks have zeros."""
        self.put_rows(tKrdS, self.rows, ds_slot)

    def put_rows(self, tKrdS, rows: int, ds_slot) -> None:
        """So many of a tile, and zeros."""
        put, tiling = self.put_matrix, self.tiling
        first, behind = ds_places(ds_slot.index, ds_slot.phase)
        zeros = cute.make_rmem_tensor(self.matrix, self.block.dtype)
        zeros.fill(0.0)
        for row in range(0, tiling.tile_m, MATRIX):
            source = zeros
            if row < rows:
                source = cute.make_tensor(tKrdS.iterator + row * ROWS // WARPGROUP, self.matrix)
            start, place = (row, first) if row < HALF_ROWS else (row - HALF_ROWS, behind)
            cute.copy(put, put.retile(source), self.ds_target(start // MATRIX)[None, None, None, place])

    def ds_target(self, number: int) -> cute.Tensor:
        """The `number`-th matrix of queries from any half product on, of this warpgroup's keys."""
        sdS = from_halves(self.block.sdS, self.tiling.ds_rows, self.tiling.tile_n, ROWS)
        mine = cute.local_tile(permuted(sdS, 1, 0, 2), (ROWS, MATRIX), (self.number, number, None))
        return self.put_matrix.partition_D(mine)

    def start_dq(self, ds_slot):
        self.block.ds_edge.wait(ds_slot)
        return self.dq.issue(product_place(ds_slot.index, ds_slot.phase, self.number))

    def put_dq(self, tQrdQ):
        WarpStrips(self.number, self.thread).store(self.block.sdQ, tQrdQ)

    def has_dq(self, last):
        return last.exists == MINE

    def pass_dq(self, last, ds_slot):
        _release_if(last.exists == OTHERS, self, ds_slot)

    def following(self, call, m, carried):
        """The slot of dQ goes on where this warpgroup has a product, and is that behind it."""
        dq_slot, rings, _ = carried
        *_, ds_slot = rings
        is_mine = (ds_slot.index != 0) | is_outer(ds_slot.phase, self.number)
        exists = choose(is_mine, MINE, OTHERS)
        further = Slot(1, dq_slot.index, dq_slot.phase ^ (exists & 1))
        return further, rings.next(), LastDq(Int64(0), exists)

    def short_step(self, call, m, tested, carried):
        self.step_short(call, m, tested, carried)
        return self.following(call, m, carried)

    def end(self, carried):
        """The product behind the last tile; of a pair that lacks its second tile, the middle one too."""
        dq_slot, rings, last = carried
        *_, ds_slot = rings
        dq_slot = Slot(1, dq_slot.index, dq_slot.phase ^ (last.exists >> 1))
        self.dq_slot = Slot(1, self.number, dq_slot.phase)  # of what follows the last dQ on its way out
        _last_of_all(self, last, dq_slot.before(), ds_slot.before())
        return dq_slot, rings, LastDq.none()


@cute.jit
def _release_if(condition: Boolean, me: cutlass.Constexpr, ds_slot: Slot):
    if condition:
        me.block.ds_edge.release(ds_slot, me.lane)


@cute.jit
def _last_of_all(me: cutlass.Constexpr, last: LastDq, dq_slot: Slot, ds_slot: Slot):
    if last.exists != 0:
        me.block.ds_edge.wait(ds_slot)
        second = choose(last.exists == OTHERS, 1, ds_slot.index)  # the product that would follow the second tile
        tQrdQ = me.dq.issue(product_place(second, ds_slot.phase, me.number))
        warpgroup.wait_group(0)
        me.leave_dq(last, tQrdQ, dq_slot, ds_slot)
