"""Work tiles of blocks that were not started, which a block that is done takes over: cluster launch control."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...primitives.pipelines import BoundEdge, Slot
from ...primitives.values import Fixed, choose

BYTES = 16  # of an answer


class TakeOver(Fixed):
    """One warp asks; answers come to the stages of `edge`, `BYTES` each, and all warps hear them in order.

    The first answer that there is no such block is the last one: nobody asks again.
    """

    def __init__(self, edge: BoundEdge, answers: cute.Pointer) -> None:
        self.edge, self.answers = edge, answers

    @property
    def first(self) -> Slot:
        return self.edge.first

    def ask(self, slot: Slot) -> None:
        """By the warp that asks, once all have heard what `slot` held before."""
        barrier = self.edge.acquire(slot)
        with cute.arch.elect_one():
            cute.arch.issue_clc_query(barrier, self._answer(slot), multicast=False)

    def hear(self, slot: Slot, lane: Int32) -> tuple[Int32, Boolean]:
        """(the block that is taken over, whether there is one); by each warp."""
        self.edge.wait(slot)
        block, _, _, there = cute.arch.clc_response(self._answer(slot))
        cute.arch.fence_view_async_shared()  # the next answer is written behind this read
        cute.arch.sync_warp()
        self.edge.release(slot, lane)
        there = cute.arch.make_warp_uniform(there)
        return cute.arch.make_warp_uniform(choose(there != 0, block, 0)), there != 0

    def _answer(self, slot: Slot) -> cute.Pointer:
        return self.answers + slot.index


@cute.jit
def ask_until_none_is_left(queue: TakeOver):
    """What the asking warp does for as long as its block lives."""
    slot, there = queue.first, Boolean(True)
    while there:
        queue.ask(slot)
        _, there = queue.hear(slot, cute.arch.lane_idx())
        slot = slot.next()


__all__ = ["BYTES", "TakeOver", "ask_until_none_is_left"]
