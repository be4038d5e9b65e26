"""Work tiles for two blocks that compute each of them together: one draws, both hear."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .block_pair import LEADER, arrive_at, other, rank
from .dynamic_scheduler import DynamicScheduler
from .pipelines import Slot


class PairScheduler(DynamicScheduler):
    """The copying warp of the leading block draws a number, and puts it into the shared memory of both.

    All consumers of `edge` arrive at the leader's barrier (`PairWarps`): those who hear, and of each block the copying
    warp, which in the other block hears as they do.
    """

    def hand_out(self, slot: Slot, lane: Int32) -> Int32:
        return _drawn_or_heard(self, slot, lane)

    def first_free(self) -> Int32:
        return cute.arch.grid_dim()[0] // 2

    def put(self, slot: Slot, number: Int32, lane: Int32) -> None:
        super().put(slot, number, lane)
        place = cute.arch.map_dsmem_ptr(self.numbers + slot.index, other())
        _put_there(place, number, self.edge.full + slot.index, lane == 0)


@cute.jit
def _drawn_or_heard(queue: cutlass.Constexpr, slot: Slot, lane: Int32) -> Int32:
    number = Int32(0)
    if rank() == LEADER:
        number = queue.draw(lane)
        queue.announce(slot, number, lane)
        queue.edge.release(slot, lane)
    else:
        number = queue.hear(slot, lane)
    return number


@cute.jit
def _put_there(place: cute.Pointer, number: Int32, barrier: cute.Pointer, condition: Boolean):
    if condition:
        said = cute.make_rmem_tensor(1, Int32)
        said[0] = number
        cute.autovec_copy(said, cute.make_tensor(place, cute.make_layout(1)))
        arrive_at(barrier, other(), Int32(0))
