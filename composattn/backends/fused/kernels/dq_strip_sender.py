"""Who sends dQ by thirds: strips of a tile, as products of two tiles leave them in shared memory (`dq_thirds`)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ....primitives.bulk_sums import wait_sums
from ....primitives.pipelines import Slot
from ....primitives.turns import say
from ....primitives.values import Bundle
from .dq_sender import DqSender
from .dq_thirds import HALF, WARPS, is_outer, middle_half, outer_strip


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


class DqStripSender(DqSender):
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
            self.leave(slot)
            if const_expr(block.turn_edge is not None):
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
            self.leave(slot)
            if const_expr(self.block.turn_edge is not None):
                self.say(rest)
            slot = slot.next()
        return slot

    def leave(self, slot) -> None:
        """The end of what was started: its place is free, and in turns it is written."""
        wait_sums(Boolean(True), read=True)
        self.block.dq_edge.release(self.room(slot), cute.arch.lane_idx())
        if self.block.turn_edge is not None:
            wait_sums(Boolean(True), read=False)

    def room(self, slot) -> Slot:
        return Slot(1, self.number, slot.phase)

    def say(self, tile) -> None:
        say(cute.make_ptr(Int32, tile.turn, cute.AddressSpace.gmem), cute.arch.lane_idx() == 0)

    def start_half(self, tile, second, phase) -> None:
        half, strip = middle_half(second, phase)
        self.start(tile, HALF * half, strip, HALF)

    def start(self, tile, source, strip, count: int) -> None:
        """The copy of `count` strips of this group, from `source` on, to those of the tile from `strip` on."""
        size = 16 * self.kernel.tiling.d  # numbers
        shared = (self.block.sdQ.iterator + (WARPS * self.number + source) * size).toint()
        whole = cute.make_ptr(Float32, tile.tile, cute.AddressSpace.gmem, assumed_align=16)
        self.start_sum(tile.writes, shared, whole + strip * size, size * count)
