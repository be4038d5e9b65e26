"""A Hopper backward that computes dQ of two query tiles at once, see `dq_thirds`."""

import copy

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...primitives.bulk_sums import add_if, wait_sums, write_or_add
from ...primitives.pipelines import Slot
from ...primitives.values import Bundle, choose, permuted
from ..fused.kernels.dq_semaphore import say
from ..fused.kernels.dq_sender import DqSender
from .backward import Consumer, HopperBackward, LastDq
from .backward_tiling import HALF_ROWS
from .dq_thirds import (
    HALF,
    WARPS,
    WarpStrips,
    ds_places,
    from_halves,
    is_outer,
    middle_half,
    outer_strip,
    product_place,
)
from .wgmma import ROWS, WARPGROUP, product, store_matrix

MATRIX = 16  # queries, of which dS goes to memory at a time
MINE, OTHERS = 1, 2  # products behind a tile: this warpgroup's, or the other one's alone


class HopperBackwardThirds(HopperBackward):
    """Roles as of `HopperBackward`. In two of three steps a warpgroup has a product for dQ."""

    def sender(self, block, number):
        return ThirdsSender(self, block, number)

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
        return super().starts(slots)

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

    def following(self, call, m, slots):
        """The slot of dQ goes on where this warpgroup has a product, and is that behind it."""
        dq_slot, q_slot, do_slot, ds_slot, _ = slots
        is_mine = (ds_slot.index != 0) | is_outer(ds_slot.phase, self.number)
        exists = choose(is_mine, MINE, OTHERS)
        further = Slot(1, dq_slot.index, dq_slot.phase ^ (exists & 1))
        return further, q_slot.next(), do_slot.next(), ds_slot.next(), LastDq(Int64(0), exists)

    def short_step(self, call, m, tested, slots):
        short = copy.copy(self)
        short.lay_scores(self.tiling.short_rows)
        short.of_rows(self.tiling.short_rows)
        short.step(call, m, tested, *slots)
        return self.following(call, m, slots)

    def end(self, slots):
        """The product behind the last tile; of a pair that lacks its second tile, the middle one too."""
        dq_slot, q_slot, do_slot, ds_slot, last = slots
        dq_slot = Slot(1, dq_slot.index, dq_slot.phase ^ (last.exists >> 1))
        self.dq_slot = Slot(1, self.number, dq_slot.phase)  # of what follows the last dQ on its way out
        _last_of_all(self, last, dq_slot.before(), ds_slot.before())
        return dq_slot, q_slot, do_slot, ds_slot, LastDq.none()


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


class DqTile(Bundle):
    """A tile of dQ: where it is summed, whether this block is the first there, and where turns are counted.

    One that `exists` not is 0.
    """

    parts = ("exists", "tile", "writes", "turn")

    def __init__(self, exists: Int32, tile: Int64, writes: Int32, turn: Int64):
        self.exists, self.tile, self.writes, self.turn = exists, tile, writes, turn

    @staticmethod
    def none() -> "DqTile":
        return DqTile(Int32(0), Int64(0), Int32(0), Int64(0))


class ThirdsSender(DqSender):
    """Sends the strips of each product to the tiles that they are of."""

    def starts(self):
        return *super().starts(), Slot.first(2)

    @cute.jit
    def visit(self, call, work, slots):
        slot, turn_slot, ds_slot = slots
        rest = DqTile.none()
        begin, stop = self.kernel.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            for run in self.kernel.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    m = run.tile(i)
                    padded = work.padded
                    tile = call.dq_accum[padded.b, head, padded.first + m, None].iterator.toint()
                    turn = Int64(0)
                    if const_expr(self.block.turn_edge is not None):
                        turn = self.kernel.turn(call, work, head, m).toint()
                    mine = DqTile(Int32(1), tile, Int32(0), turn)
                    slot, turn_slot, rest = self.send(mine, rest, slot, turn_slot, ds_slot)
                    ds_slot = ds_slot.next()
        slot = self.send_rest(rest, slot, ds_slot.before())
        self.end_tile(call, work, slot)
        return slot, turn_slot, ds_slot

    @cute.jit
    def send(self, tile, rest, slot, turn_slot, ds_slot):
        """What follows a query tile: an outer product, the middle one, or nothing yet."""
        block, lane = self.block, cute.arch.lane_idx()
        second, phase = ds_slot.index, ds_slot.phase
        outer = is_outer(phase, self.number)
        is_there = outer | (second != 0)
        if is_there:
            block.dq_edge.wait(self.room(slot))
        if const_expr(block.turn_edge is not None):
            block.turn_edge.wait(turn_slot)
            if const_expr(block.firsts is not None):
                tile.writes = block.is_first(turn_slot)
            block.turn_edge.release(turn_slot, lane)
            turn_slot = turn_slot.next()
        if is_there:
            if outer:
                self.start(tile, 0, outer_strip(second, phase), WARPS)
            else:
                self.start_half(tile, second, phase)
                if rest.exists != 0:
                    self.start_half(rest, 0, phase)
            wait_sums(Boolean(True), read=True)
            block.dq_edge.release(self.room(slot), lane)
            if const_expr(block.turn_edge is not None):
                wait_sums(Boolean(True), read=False)
                self.say(tile)
                if (rest.exists != 0) & ~outer:
                    self.say(rest)
            slot = slot.next()
            rest = DqTile.none()
        else:
            rest = tile
        return slot, turn_slot, rest

    @cute.jit
    def send_rest(self, rest, slot, ds_slot):
        """The last tile's, which has no second one behind it."""
        if rest.exists != 0:
            self.block.dq_edge.wait(self.room(slot))
            self.start_half(rest, 0, ds_slot.phase)
            wait_sums(Boolean(True), read=True)
            self.block.dq_edge.release(self.room(slot), cute.arch.lane_idx())
            if const_expr(self.block.turn_edge is not None):
                wait_sums(Boolean(True), read=False)
                self.say(rest)
            slot = slot.next()
        return slot

    def room(self, slot) -> Slot:
        return Slot(1, self.number, slot.phase)

    def say(self, tile) -> None:
        say(cute.make_ptr(Int32, tile.turn, cute.AddressSpace.gmem), cute.arch.lane_idx() == 0)

    def start_half(self, tile, second, phase) -> None:
        half, strip = middle_half(second, phase)
        self.start(tile, HALF * half, strip, HALF)

    def start(self, tile, source, strip, count: int) -> None:
        """The copy of `count` strips of this warpgroup, from `source` on, to those of the tile from `strip` on."""
        size = 16 * self.kernel.tiling.d  # numbers
        shared = (self.block.sdQ.iterator + (WARPS * self.number + source) * size).toint()
        whole = cute.make_ptr(Float32, tile.tile, cute.AddressSpace.gmem, assumed_align=16)
        if const_expr(self.kernel.tiling.first_writes):
            write_or_add(tile.writes, shared, whole + strip * size, 4 * size * count)
        else:
            add_if(Boolean(True), shared, whole + strip * size, 4 * size * count)
