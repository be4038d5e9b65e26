"""The correction warpgroup of the forward: rescales outputs in tensor memory, and takes them out at the end."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...primitives.pipelines import Slot
from ...primitives.values import Fixed, narrow
from ..fused.kernels.query_rows import Places, of_part
from .block import Tile
from .tcgen05 import after_wait, before_arrival, load, store, wait_stores
from .tiling import ROWS

AT_ONCE = 32  # columns of O in registers


class Correction(Fixed):
    """A thread's row of the query tile `me`."""

    def __init__(self, kernel, me: Tile, work):
        self.kernel, self.me, self.block, self.tiling, self.work = kernel, me, me.block, me.tiling, work

    def begin(self, place: Slot) -> Slot:
        """Nothing was added to O yet: it may be."""
        self.block.early.fill(place, self.me.lane)
        return place.next()

    def take_factor(self, factor: Slot):
        self.block.factors.wait(factor)
        number = self.me.factor()[0]
        cute.arch.sync_warp()
        self.block.factors.release(factor, self.me.lane)
        return number

    @cute.jit
    def rescale(self, place: Slot, factor: Slot, added: Slot):
        """O times the row's factor, left out by warps of which no row needs it; then more may be added to it."""
        number = self.take_factor(factor)
        if cutlass.const_expr(self.tiling.score_places > 1):
            # with one place, what was added came before the scores that the factor is of; not only where a warp
            # rescales: a parity tells but two neighbouring phases apart
            self.block.outputs.wait(added)
        if cute.arch.vote_any_sync(number != 1.0):
            after_wait()
            for first in cutlass.range_constexpr(0, self.tiling.dv, AT_ONCE):
                self.scale_columns(first, number)
            wait_stores()
        cute.arch.sync_warp()
        self.block.early.fill(place, self.me.lane)

    def scale_columns(self, first: int, number) -> None:
        address = self.me.output() + first
        scaled = cute.make_rmem_tensor(AT_ONCE, Float32)
        for i, value in enumerate(load(address, AT_ONCE)):
            scaled[i] = value * number
        store(address, cute.recast_tensor(scaled, Int32))

    @cute.jit
    def finish(self, call, any_keys: Boolean, factor: Slot, added: Slot):
        """O, its rows normalised, to shared memory for a bulk store, or row by row to its tensor."""
        normalizer = self.take_factor(factor)
        if any_keys:
            self.block.outputs.wait(added)
            after_wait()
        else:
            self.clear()
        for first in cutlass.range_constexpr(0, self.tiling.dv, AT_ONCE):
            numbers = cute.make_rmem_tensor(AT_ONCE, Float32)
            values = load(self.me.output() + first, AT_ONCE)
            for i in cutlass.range_constexpr(AT_ONCE):
                numbers[i] = values[i] * normalizer
            self.put(call, first, numbers)
        before_arrival()
        if cutlass.const_expr(not self.kernel.plan.direct_store):
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            self.block.staged.fill(Slot(1, Int32(self.me.number), Int32(0)), self.me.lane)

    def clear(self) -> None:
        zeros = cute.make_rmem_tensor(AT_ONCE, Int32)
        zeros.fill(0)
        for first in range(0, self.tiling.dv, AT_ONCE):
            store(self.me.output() + first, zeros)
        wait_stores()

    def put(self, call, first: int, numbers) -> None:
        """Columns of O from `first` on."""
        if self.kernel.plan.direct_store:
            self.put_row(call, first, numbers)
            return
        rounded = cute.make_rmem_tensor(AT_ONCE, self.block.dtype)
        narrow(rounded, numbers)
        start = self.block.o_start[self.me.number]
        self.block.put_output(start, self.me.row, first, cute.recast_tensor(rounded, Int32))

    def put_row(self, call, first: int, numbers) -> None:
        """Straight to the row: few rows, or few parts."""
        row = self.work.m * self.tiling.tile_m + self.me.number * ROWS + self.me.row
        places = Places(self.tiling, self.kernel.fragment, self.kernel.heads, self.work, row)
        q, h, inside = places.row_place(0)
        target = self.work.queries.head(of_part(call.tensors.out, self.work.part), h)
        columns = min(AT_ONCE, self.kernel.plan.head_dim_v - first)
        _store_row(target, q, first, numbers, columns, inside)


@cute.jit
def _store_row(target, q: Int32, first: cutlass.Constexpr, numbers, columns: cutlass.Constexpr, inside: Boolean):
    if inside:
        for c in cutlass.range_constexpr(0, columns, 8):
            eight = cute.make_tensor(numbers.iterator + c, cute.make_layout(8))
            if cutlass.const_expr(target.element_type is not Float32):
                rounded = cute.make_rmem_tensor(8, target.element_type)
                narrow(rounded, eight)
                eight = rounded
            cute.autovec_copy(eight, cute.local_tile(target[q, None], (8,), ((first + c) // 8,)))
