"""Warps of the backward that round dQ of heads whose sums are complete, while others compute.

The kernel behind takes 46 to 49 us for all of dQ (16k tokens, hidden size 2048), a tenth of short calls, and reads from
device memory what was in L2 when it was complete. Here each tile of keys says of its head when it is done, and warps
with nothing else to do round the tiles of heads that are. Tiles are dealt out beforehand: nobody draws. What they have
not come to when their block ends is left to the kernel behind, so nobody waits for them, nor they for others.
"""

from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ....primitives.lanes import LANES, WARP, add, over_lanes
from ....primitives.padded_tiles import PaddedTiles
from ....primitives.tile_queue import TileQueue
from ....primitives.tile_scheduler import Stretch
from ....primitives.turns import peek, say
from ....primitives.values import Fixed, aligned, choose, move, narrowed

AT_ONCE = 4  # chunks of 16 bytes that a lane reads before it rounds them


class Chunks(Protocol):
    """Where an architecture's sums of a tile of dQ lie: in steps, of each of which a lane has `AT_ONCE` chunks."""

    steps: int
    apart: int  # numbers from one of them to the next
    columns: int  # side by side, of a row, that a lane rounds together

    def first(self, lane: Int32) -> Int32:
        """Which number of a step its first chunk begins with."""

    def targets(self, step: Int32, lane: Int32) -> list[tuple[Int32, Int32, list[tuple[int, int]]]]:
        """(row, first column, (chunk, number in it) of each column) of the tile, which these chunks are."""


class DqRounding(Fixed):
    """`done`: int32 (B or 1, Hkv), how many say that they have added to a head's dQ; `rounded`: int32 (B, H, tiles).

    `dq`: the tensor, and `rows` the table of tiles of queries, if they have one.
    """

    def __init__(self, kernel: Any, dq: cute.Tensor, done: cute.Tensor, rounded: cute.Tensor, rows: Any):
        self.kernel, self.dq, self.done, self.rounded, self.rows = kernel, dq, done, rounded, rows
        self.chunks: Chunks = kernel.chunks()

    # --- who has added says so ---------------------------------------------------------------------------------

    @cute.jit
    def tell(self, call, block):
        """A warp that says of each tile of keys that it is done, for those whose additions leave from registers."""
        cute.arch.griddepcontrol_wait()  # for empty flags: a tile that no query sees waits for nothing else
        self.kernel.walk(call, block, lambda *work: self.tell_tile(block, *work), TileQueue.hear, block.done_edge.first)

    def tell_tile(self, block, call, work, slot):
        lane = cute.arch.lane_idx()
        block.done_edge.wait(slot)
        block.done_edge.release(slot, lane)
        self.say_done(call, work, lane)
        return slot.next()

    def say_done(self, call, work, lane: Int32) -> None:
        """A tile of keys, or its piece, has been added to all that it visits, and what it added is there."""
        parts = 1
        if call.pieces is not None:
            # a whole tile counts as many as the pieces of one that is cut
            parts = choose(work.piece.is_whole, call.pieces.count.divisor, Int32(1))
        say(self._flag(call, work.b, work.kv_head), lane == 0, parts)

    def _flag(self, call, b: Int32, kv_head: Int32) -> cute.Pointer:
        """Of a head, of one sequence or, where tiles of keys come by a table, of all."""
        entry = 0 if call.order.table is not None else b
        return self.done[entry, None].iterator + kv_head

    @cute.jit
    def _wanted(self, call, lane: Int32) -> Int32:
        """How many say so of a head."""
        tiles = call.order.blocks
        if const_expr(call.order.table is not None):
            tiles = Int32(0)  # entries that are too many come last
            for step in cutlass.range((call.order.blocks + (LANES - 1)) // LANES, unroll=1):
                entry = step * LANES + lane
                there = call.order.table[cutlass.min(entry, call.order.blocks - 1), 0] >= 0
                tiles = tiles + Int32(there & (entry < call.order.blocks))
            tiles = over_lanes(add, tiles, WARP[::-1])
        parts = 1 if call.pieces is None else call.pieces.count.divisor
        return tiles * parts * self.kernel.tiling.done_speakers

    # --- who rounds --------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, call, block, index: Int32, warps: cutlass.Constexpr[int]):
        """The `index`-th of so many `warps` of a block."""
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_wait()  # for empty flags, and who may still read what dQ is written over
        wanted = self._wanted(call, lane)
        entries, heads, tiles, _ = call.dq_accum.shape
        count = tiles
        if const_expr(self.rows is not None):
            entries, count = 1, self.rows.shape[0]
        number = cute.arch.block_idx()[0] * warps + index
        running = Boolean(True)
        while (number < entries * heads * count) & running:
            head, tile = number // count, number % count
            entry, head = head // heads, head % heads
            if peek(self._flag(call, entry, head // call.group)) >= wanted:
                cute.arch.fence_acq_rel_gpu()
                self.round(call, block, entry, head, tile, lane)
                number = number + cute.arch.grid_dim()[0] * warps
            else:
                cute.arch.inline_ptx("nanosleep.u32 500;")
            running = ~block.end_edge.is_full(block.end_edge.first)

    @cute.jit
    def round(self, call, block, entry, head, tile, lane):
        """The tile that has this number in its sequence, or in the table."""
        if const_expr(self.rows is None):
            self.round_tile(call, block, call.queries.sequence(entry), entry, head, tile, lane)
        else:
            b, m = self.rows[tile, 0], self.rows[tile, 1]
            if b >= 0:
                sequence = call.queries.sequence(b).within(Stretch.of(self.rows, tile))
                self.round_tile(call, block, sequence, b, head, m, lane)

    @cute.jit
    def round_tile(self, call, block, sequence, b, head, tile, lane):
        chunks, tile_m = self.chunks, self.kernel.tiling.tile_m
        padded = PaddedTiles.of(sequence, b, tile_m)
        if const_expr(call.clearing is not None):
            call.clearing.wait(padded.b, head)  # no tile of keys has, of a head that sees nothing
        sums = call.dq_accum[padded.b, head, padded.first + tile, None].iterator
        mine = sums + chunks.first(lane)
        first = sequence.from_start(tile * tile_m)
        rows = cute.domain_offset((first, 0), sequence.head(self.dq, head))
        there = sequence.end - first
        step, running = Int32(0), Boolean(True)
        while (step < chunks.steps) & running:
            registers = cute.make_rmem_tensor(4 * AT_ONCE, Float32)
            for i in range(AT_ONCE):
                place = aligned(mine + (step * (LANES * 4 * AT_ONCE) + i * chunks.apart))
                four = cute.make_layout(4)
                move(cute.make_tensor(place, four), cute.make_tensor(registers.iterator + 4 * i, four))
            for row, column, numbers in chunks.targets(step, lane):
                together = cute.make_rmem_tensor(chunks.columns, Float32)
                for i, (chunk, number) in enumerate(numbers):
                    together[i] = registers[4 * chunk + number] * call.scale
                inside = row < there
                if const_expr(self.kernel.plan.head_dim < self.kernel.tiling.d):
                    inside = inside & (column < self.kernel.plan.head_dim)
                _store_if(inside, rows, row, column, narrowed(together, self.dq.element_type))
            step = step + 1
            running = ~block.end_edge.is_full(block.end_edge.first)
        if (step == chunks.steps) & (lane == 0):
            self.rounded[padded.b, head, padded.first + tile] = Int32(1)


@cute.jit
def _store_if(condition: Boolean, rows: cute.Tensor, row: Int32, column: Int32, numbers: cute.Tensor):
    if condition:
        width = cute.size(numbers)
        start = rows[row, None].iterator + column
        place = cute.make_ptr(start.dtype, start.toint(), start.memspace, assumed_align=2 * width)
        move(numbers, cute.make_tensor(place, cute.make_layout(width)))


__all__ = ["Chunks", "DqRounding"]
