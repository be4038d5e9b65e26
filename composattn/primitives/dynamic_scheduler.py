"""Work tiles handed out one at a time: a counter in device memory, and how a block's warps learn the next tile.

Blocks that stay for many tiles take the next one when they are free, as the hardware hands blocks to SMs;
a fixed stride does not even out tiles of different lengths. The first tile of a block is the block's own number, or
drawn as well.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .pipelines import BoundEdge, Slot
from .values import Fixed


class DynamicScheduler(Fixed):
    """One warp draws numbers and announces them on `edge`, whose stages hold one each; all others hear them in order.

    `counter`: int32 (1,), zero when the kernel starts. `tiles`: how many there are, where the kernel leaves the counter
    at zero: each block draws until a number is too large, which makes as many draws as there are tiles, and with the
    last one the counter wraps. None: another kernel clears it.
    `draws_first`: whether the first tile of a block is drawn too, so that blocks which run have all the lowest numbers:
    where tiles wait for those of lower numbers, and fewer blocks run at once than were launched, others would wait for
    the first tile of a block that does not begin before one of them ends.
    """

    def __init__(
        self,
        edge: BoundEdge,
        numbers: cute.Pointer,
        counter: cute.Tensor,
        tiles: Int32 | None = None,
        draws_first: bool = False,
    ) -> None:
        self.edge, self.numbers, self.counter, self.tiles = edge, numbers, counter, tiles
        self.draws_first = draws_first

    def draw(self, lane: Int32) -> Int32:
        """The next number, in all lanes of the warp that announces."""
        asked = one_more(self.counter.iterator, lane == 0, None if self.tiles is None else self.tiles - 1)
        drawn = cute.arch.shuffle_sync(asked, 0)
        return drawn if self.draws_first else self.first_free() + drawn

    def announce(self, slot: Slot, number: Int32, lane: Int32) -> None:
        """To all who hear, once all have heard what `slot` held before."""
        self.edge.wait_empty(slot)
        self.put(slot, number, lane)

    def first_free(self) -> Int32:
        """The first number that no block has from the start."""
        return cute.arch.grid_dim()[0]

    def put(self, slot: Slot, number: Int32, lane: Int32) -> None:
        """Where all will look for it."""
        _put_if(self.numbers + slot.index, number, self.edge.full + slot.index, lane == 0)

    def hand_out(self, slot: Slot, lane: Int32) -> Int32:
        """The next number, which all others hear, for the warp that announces."""
        number = self.draw(lane)
        self.announce(slot, number, lane)
        return number

    def hear(self, slot: Slot, lane: Int32) -> Int32:
        """The number that is announced on `slot`."""
        self.edge.wait(slot)
        number = cute.arch.make_warp_uniform(cute.make_tensor(self.numbers + slot.index, cute.make_layout(1))[0])
        cute.arch.sync_warp()
        self.edge.release(slot, lane)
        return number


@cute.jit
def one_more(counter: cute.Pointer, condition: Boolean, last: Int32 | None = None) -> Int32:
    """What was there before it grew by one, where the condition holds; behind `last` zero follows."""
    found = Int32(0)
    if condition:
        if const_expr(last is None):
            found = cute.arch.inline_ptx(
                "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[counter]
            )
        else:
            found = cute.arch.inline_ptx(
                "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
                write_only_types=[Int32],
                read_only_args=[counter, last],
            )
    return found


@cute.jit
def _put_if(place: cute.Pointer, number: Int32, barrier: cute.Pointer, condition: cutlass.Boolean):
    if condition:
        cute.make_tensor(place, cute.make_layout(1))[0] = number
        cute.arch.mbarrier_arrive(barrier)
