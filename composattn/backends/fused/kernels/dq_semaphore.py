"""Turns of the backward in a fixed order: a tile of dQ is added to by one tile of keys after another, the last first.

A warp of its own waits in device memory until as many blocks as come before this one have added to a query tile, lets
the consumers add theirs, and says so; or another warp does (`tell`), or whoever adds, each of several (`say`): then the
one that waits looks ahead. A block waits only for tiles of keys that others began before it: those of lower numbers.
"""

from operator import add

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ....primitives.branches import store_if
from ....primitives.dynamic_scheduler import DynamicScheduler
from ....primitives.lanes import WARP, over_lanes
from ....primitives.q_tiles import ListedQueryRun
from ....primitives.turns import publish_if, say, wait_for
from ....primitives.values import Fixed, choose


class DqSemaphore(Fixed):
    """What the warp that waits does, in a backward kernel, whose walk it repeats.

    `speakers`: how many of a block say that they have added; 0: this warp says it for all.
    """

    def __init__(self, kernel, speakers: int = 0):
        self.kernel, self.speakers = kernel, speakers

    @cute.jit
    def take(self, call, block):
        self.kernel.walk(
            call, block, lambda *work: self.take_tile(block, *work), DynamicScheduler.hear, block.turn_edge.first
        )

    @cute.jit
    def take_tile(self, block, call, work, slot):
        """Turns of one tile of keys."""
        lane = cute.arch.lane_idx()
        begin, stop = self.kernel.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            for run in self.kernel.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    m = run.tile(i)
                    turn = self.kernel.turn(call, work, head, m)
                    before = self.before(call, work, head, run, i, lane)
                    wait_for(turn, before * max(1, self.speakers))
                    cute.arch.sync_warp()
                    block.turn_edge.wait_empty(slot)
                    if const_expr(self.kernel.tiling.first_writes):
                        firsts = cute.make_tensor(block.firsts + slot.index, cute.make_layout(1))
                        store_if(lane == 0, firsts, 0, Int32(before == 0))
                        cute.arch.sync_warp()
                    block.turn_edge.fill(slot)
                    slot = slot.next()
                    if const_expr(not self.speakers):
                        # empty again: all consumers have added their parts
                        block.turn_edge.wait_empty(slot)
                        publish_if(turn, before + 1, lane == 0)
        return slot

    @cute.jit
    def tell(self, call, block):
        """What the warp does that says for all that they have added, and frees the turn of a later tile."""
        self.kernel.walk(
            call, block, lambda *work: self.tell_tile(block, *work), DynamicScheduler.hear, block.turn_edge.first
        )

    @cute.jit
    def tell_tile(self, block, call, work, slot):
        """Tells of one tile of keys."""
        lane = cute.arch.lane_idx()
        begin, stop = self.kernel.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            for run in self.kernel.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    block.added_edge.wait(slot)
                    block.turn_edge.release(slot, lane)
                    say(self.kernel.turn(call, work, head, run.tile(i)), lane == 0)
                    slot = slot.next()
        return slot

    def before(self, call, work, head, run, i, lane):
        """How many tiles of keys whose turn is before this block's visit the `i`-th query tile of `run`."""
        if isinstance(run, ListedQueryRun):
            return run.before(i)
        return self.blocks_before(call, work, head, run.tile(i), lane)

    @cute.jit
    def blocks_before(self, call, work, head, m, lane):
        """How many tiles of keys beyond this block's, or backwards before it, visit query tile `m`.

        A lane each looks at some.
        """
        count = Int32(0)
        first, end = choose(work.backwards, 0, work.n + 1), choose(work.backwards, work.n, work.count)
        for step in cutlass.range((end - first + 31) // 32, unroll=1):
            other = first + step * 32 + lane
            visits = Boolean(False)
            for run in self.kernel.query_tiles(call, work, head, cutlass.min(other, end - 1)):
                visits = visits | run.visits(m)
            count = count + Int32(visits & (other < end))
        return over_lanes(add, count, WARP[::-1])
