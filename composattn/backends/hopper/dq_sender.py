"""A warp of the backward that adds one warpgroup's parts of dQ, which lie in shared memory, to device memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from ...primitives.bulk_sums import add_if, wait_sums
from ...primitives.pipelines import Slot
from ...primitives.tile_queue import TileQueue
from ...primitives.values import Fixed


class DqSender(Fixed):
    """What the warp does for warpgroup `number`: the walk of the kernel again, a bulk copy that adds for each tile.

    So the load/store unit of those who compute is free: they write to shared memory, and wait for nothing.
    """

    def __init__(self, kernel: Any, block: Any, number: Any):
        self.kernel, self.block, self.number = kernel, block, number
        self.part = kernel.tiling.tile_m * kernel.tiling.d // kernel.tiling.warpgroups

    @cute.jit
    def run(self, call):
        self.kernel.walk(call, self.block, lambda *work: self.visit(*work), TileQueue.hear, Slot.first(1))

    @cute.jit
    def visit(self, call, work, slot):
        edge, first = self.block.dq_edge, self.number * self.part
        source = (self.block.sdQ.iterator + first).toint()
        for member in cutlass.range(call.group, unroll=1):
            head = work.kv_head * call.group + member
            for run in self.kernel.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    padded = work.padded
                    target = call.dq_accum[padded.b, head, padded.first + run.tile(i), None].iterator
                    mine = Slot(1, self.number, slot.phase)
                    edge.wait(mine)
                    add_if(Boolean(True), source, target + first, 4 * self.part)
                    wait_sums(Boolean(True), read=True)
                    edge.release(mine, cute.arch.lane_idx())
                    slot = slot.next()
        return slot
