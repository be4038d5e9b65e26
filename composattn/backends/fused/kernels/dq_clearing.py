"""A warp of the backward that clears sums of dQ, tile after tile, while others begin to compute.

In the preprocess it takes 30 us (16k tokens, hidden size 2048), a quarter of the small kernels' time. Here tiles are
handed out by a counter, in the order in which heads are worked on; whoever loads queries waits until their head's tiles
are all clear. The warps of whichever blocks run clear all there is, so nobody waits for a block that has not started.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....primitives.dynamic_scheduler import one_more
from ....primitives.lanes import LANES
from ....primitives.register_chunks import clear
from ....primitives.turns import say, wait_for
from ....primitives.values import Fixed


class DqClearing(Fixed):
    """`cleared`: int32 (B, H), how many tiles of a head's dQ are clear; behind `counter`: those handed out."""

    def __init__(self, dq_accum: cute.Tensor, cleared: cute.Tensor, counter: cute.Tensor):
        self.dq_accum, self.cleared, self.counter = dq_accum, cleared, counter

    @cute.jit
    def run(self, call):
        """One warp of each block."""
        lane = cute.arch.lane_idx()
        entries, heads, tiles, width = self.dq_accum.shape
        cute.arch.griddepcontrol_wait()  # for the counters
        number = self.draw(lane)
        while number < entries * heads * tiles:
            if const_expr(call.order.table is None):
                head, tile = number // tiles, number % tiles
                entry, head = head // heads, head % heads
            else:  # which goes through all sequences of a head
                entry, tile = number // tiles, number % tiles
                head, entry = entry // entries, entry % entries
            clear(self.dq_accum[entry, head, tile, None], width, LANES, lane)
            # additions to it may be bulk copies
            cute.arch.inline_ptx("fence.proxy.async.global;")
            cute.arch.sync_warp()
            say(self.flag(entry, head), lane == 0)
            number = self.draw(lane)

    def draw(self, lane: Int32) -> Int32:
        return cute.arch.shuffle_sync(one_more(self.counter.iterator + 1, lane == 0), 0)

    def wait(self, entry: Int32, head: Int32) -> None:
        """For a warp that loads queries, or rounds: until the head's dQ is clear."""
        wait_for(self.flag(entry, head), self.dq_accum.shape[2])
        cute.arch.sync_warp()

    def flag(self, entry: Int32, head: Int32) -> cute.Pointer:
        return self.cleared.iterator + (entry * self.cleared.shape[1] + head)
