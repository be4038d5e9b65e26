"""Turns V of 8 bits, as the unit takes both operands along what is summed: (keys, Dv) to (Dv, keys), in shared memory.

A matrix of 8 x 8 pairs of bytes comes turned to registers: a thread has two channels of two keys, and in another
register those of the keys 8 behind. So a word of one channel is a choice of bytes of two registers, `prmt`. Its keys
are 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of 16: the order in which a thread has probabilities (`wgmma.round_to_e4m3`). So
no lane exchanges anything, and columns of the output are as they should be.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.arch import fence_view_async_shared

from ...primitives.matrix_loads import load_matrices
from ...primitives.swizzled_tiles import swizzled
from ...primitives.values import Fixed
from ..fused.kernels.forward import Role
from .fp8_tiling import TURNING
from .tiling import SUMS

KEYS, CHANNELS = 32, 16  # that a warp turns at once
EVEN, ODD = 0x6420, 0x7531  # bytes of two registers


class TurnValues(Role):
    """Warps beside the copying one: V of each tile as it was copied, to where products read it."""

    def __init__(self, kernel, call, block, number):
        super().__init__(kernel, call, block)
        self.number, self.lane = number, cute.arch.lane_idx()
        # Lanes of the upper half have odd channels first, so that the eight rows of a store, 0 2 4 6 9 11 13 15 and the
        # others, lie in eight banks
        upper = self.lane // 16
        self.first, self.second = EVEN + upper * (ODD - EVEN), ODD - upper * (ODD - EVEN)

    @cute.jit
    def visit(self, work, slots):
        q_slot, k_slot, v_slot = slots
        block, tiles = self.block, self.kernel.kv_tiles(self.call, work)
        for _ in cutlass.range(tiles.count, unroll=1):
            block.copied_v.wait(v_slot)
            block.v_edge.wait_empty(v_slot)
            self.turn(v_slot.index)
            fence_view_async_shared()  # products read what these stores wrote
            cute.arch.sync_warp()
            block.v_edge.fill(v_slot, self.lane)
            block.copied_v.release(v_slot, self.lane)
            v_slot = v_slot.next()
        return q_slot, k_slot, v_slot

    @cute.jit
    def turn(self, stage):
        """A stage: each warp has every third of its rows of 16 channels."""
        keys, dv, lane = self.tiling.tile_n, self.tiling.dv, self.lane
        matrix, row = lane // 8, lane % 8
        source, target = Lines(keys, dv), Lines(dv + SUMS, keys)
        get = source.start(self.block.sV, stage, lane, Int32(0))
        channel = 2 * row + (matrix % 2 ^ row // 4)
        put = target.start(self.block.sTurnedV, stage, channel, matrix // 2)
        for chunk in cutlass.range(self.number, dv // CHANNELS, TURNING, unroll=1):
            at = get + chunk // source.chunks * source.block ^ chunk % source.chunks * 16
            self.turn_chunk(at, source, put + chunk * (CHANNELS * target.wide), target)

    def turn_chunk(self, at, source, to, target):
        """16 channels of all keys of a stage."""
        blocks, at_once = self.tiling.tile_n // KEYS, self.tiling.turned_at_once
        for first in range(0, blocks, at_once):
            numbers = range(first, min(first + at_once, blocks))
            loaded = [load_matrices(at + i * (KEYS * source.wide), turned=True) for i in numbers]
            for i, (a, b, c, d) in zip(numbers, loaded, strict=True):
                block, inner = divmod(2 * i, target.chunks)
                place = (to ^ inner * 16) + block * target.block
                _store(place, [cute.arch.prmt(*two, by) for two in ((a, b), (c, d)) for by in self.selectors])

    @property
    def selectors(self):
        return self.first, self.second


class Lines(Fixed):
    """How rows of a tile of bytes lie: in blocks of `wide` columns, in `chunks` of 16 whose places a row exchanges."""

    def __init__(self, rows, columns):
        self.size, self.wide = rows * columns, swizzled(columns, element_bytes=1)
        self.chunks, self.block = self.wide // 16, rows * self.wide

    def start(self, tile, stage, row, chunk):
        """The address of a chunk of one of the first 16 rows, or 32, of a stage; those of others have the same bits."""
        return tile.iterator.toint() + stage * self.size + self.start_of(row, chunk)

    def start_of(self, row, chunk):
        """At which byte of a stage a chunk of the first block lies."""
        return row * self.wide + self.place(row, chunk) * 16

    def place(self, row, chunk):
        """Where a chunk of a row lies among the chunks of the row; which one lies there, likewise."""
        return chunk ^ (row * self.wide >> 7 & self.chunks - 1)


def _store(address, words):
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )
