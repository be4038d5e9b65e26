"""The correction of a forward whose outputs lie in memory of the tensor core: rescales them there, takes them out."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....primitives.pipelines import Slot
from .....primitives.swizzled_tiles import at_column, put_words
from .....primitives.values import Bundle, Fixed, narrow, smaller
from ..forward import Role
from ..query_rows import RowPlaces, of_part
from .query_tile import QueryTile, of_tile

RESCALED = 32  # columns of O in registers at once
TAKEN = 16  # where they leave: with 32, more than the 64 registers that a thread has were wanted


class Correction(Role):
    """A group that has a row of every query tile in each thread; its first thread is `first` of the block."""

    def __init__(self, kernel, call, block, first: int):
        super().__init__(kernel, call, block)
        thread = cute.arch.thread_idx()[0] - first
        memory = kernel.memory(block, thread)
        self.tiles = [QueryTile(block, memory, t, thread, kernel.rows) for t in range(self.tiling.query_tiles)]

    def first_slots(self):
        places = (OutputSlots(self.block.place(t), of_tile(t), of_tile(t)) for t in range(self.tiling.query_tiles))
        return (*places, Slot.first(1), Slot.first(self.tiling.v_stages))

    @cute.jit
    def visit(self, work, slots):
        at, q_slot, v_slot = slots[:-2], slots[-2], slots[-1]
        rows = [OutputRow(self, me, work) for me in self.tiles]
        shared = self.kernel.tiles_of_all(self.call, work)
        if const_expr(self.plan.layout.kv == "paged"):
            v_slot = self.clear_values(work, shared.all, v_slot)
        if const_expr(self.kernel.apart):
            at = self.walk_apart(rows, shared, at)
        else:
            first = smaller(shared.all.count, 1)
            if first > 0:
                at = tuple(row.begin(at[t]) for t, row in enumerate(rows))
            for _ in cutlass.range(first, shared.all.count, unroll=1):
                at = self.rescale_all(rows, at)
        at = self.finish(rows, shared, q_slot, at)
        return (*at, q_slot.next(), v_slot)

    @cute.jit
    def walk_apart(self, rows, shared, at):
        """Tiles that some query tile does not need, or begins with; those in which all go on; the others."""
        i, count = Int32(0), shared.all.count
        start, stop = shared.together()
        while i < count:
            for n in cutlass.range(i, start, unroll=1):
                at = self.rescale_some(rows, shared, shared.all.tile(n), at)
            for _ in cutlass.range(start, stop, unroll=1):
                at = self.rescale_all(rows, at)
            i, start, stop = stop, count, count
        return at

    def rescale_all(self, rows, at):
        return tuple(row.rescale(Boolean(True), at[t]) for t, row in enumerate(rows))

    def rescale_some(self, rows, shared, tile, at):
        return tuple(
            row.rescale_if(shared.needs(t, tile), tile != shared.of(t).first, at[t]) for t, row in enumerate(rows)
        )

    def finish(self, rows, shared, q_slot, at):
        loaded = shared.all.count > 0
        return tuple(row.finish(shared.of(t).count > 0, loaded, q_slot, at[t]) for t, row in enumerate(rows))

    @cute.jit
    def clear_values(self, work, tiles, v_slot):
        """V of the first kv tile beyond the last key to zeros: a page holds anything there, and 0 * NaN is NaN.

        Gives where V's ring is behind all tiles.
        """
        dv, rows = self.tiling.dv, self.tiling.tile_n
        if tiles.count > 0:
            self.block.v.wait(v_slot)
            thread = self.tiles[0].row
            start = self.block.v_start + v_slot.index * (2 * dv * rows)
            zeros = cute.make_rmem_tensor(4, Int32)
            zeros.fill(0)
            for row in cutlass.range(
                work.keys.length - tiles.first * rows + thread // 32, rows, self.kernel.rows // 32, unroll=1
            ):
                if thread % 32 < dv // 8:
                    put_words(start + at_column(row, thread % 32 * 8, rows, dv), zeros)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            for _ in cutlass.range(tiles.count, unroll=1):
                v_slot = v_slot.next()
        return v_slot


class OutputSlots(Bundle):
    """The slots of one query tile: where its places, outputs and sums are."""

    parts = ("place", "added", "of_sum")

    def __init__(self, place: Slot, added: Slot, of_sum: Slot) -> None:
        self.place, self.added, self.of_sum = place, added, of_sum


class OutputRow(Fixed):
    """A thread's row of the query tile `me`."""

    def __init__(self, role: Correction, me: QueryTile, work):
        self.kernel, self.call, self.tiling = role.kernel, role.call, role.tiling
        self.me, self.memory, self.block, self.work = me, me.memory, role.block, work
        self.arithmetic = role.kernel.mods.arithmetic

    @cute.jit
    def rescale_if(self, needed: Boolean, again: Boolean, at: OutputSlots):
        if needed:
            at = self.rescale(again, at)
        return at

    def begin(self, at: OutputSlots):
        """The first tile: there is nothing to rescale."""
        self.block.factors.wait(at.place)
        self.block.early.fill(at.place, self.me.lane)
        return OutputSlots(at.place.next(), at.added, at.of_sum)

    @cute.jit
    def rescale(self, again: Boolean, at: OutputSlots):
        """O times the row's factor, left out by warps of which no row needs it; then more may be added to it.

        `again`: it has something already.
        """
        self.block.factors.wait(at.place)
        number, added = self.me.factor(at.place)[0], at.added
        if const_expr(self.tiling.score_places > 1):
            added = self.wait_output(again, added)
        if again & cute.arch.vote_any_sync(number != 1.0):
            self.memory.heard()
            for first in cutlass.range_constexpr(0, self.tiling.dv, RESCALED):
                self.scale_columns(first, number)
            self.memory.written()
        cute.arch.sync_warp()
        self.block.early.fill(at.place, self.me.lane)
        return OutputSlots(at.place.next(), added, at.of_sum)

    @cute.jit
    def wait_output(self, again: Boolean, added: Slot):
        """Until what was multiplied is in O, which with one place came before the scores that the factor is of.

        Not only where a warp rescales: a parity tells but two neighbouring phases apart.
        """
        if again:
            self.block.outputs.wait(added)
            added = added.next()
        return added

    def scale_columns(self, first: int, number) -> None:
        column = self.me.output() + first
        scaled = cute.make_rmem_tensor(RESCALED, Float32)
        for i, value in enumerate(self.arithmetic.times(self.memory.read(column, RESCALED), number)):
            scaled[i] = value
        self.memory.write(column, cute.recast_tensor(scaled, Int32))

    @cute.jit
    def finish(self, any_keys: Boolean, loaded: Boolean, q_slot: Slot, at: OutputSlots):
        """O, its rows normalised, to shared memory for a bulk store, or row by row to its tensor."""
        self.block.sums.wait(at.of_sum)
        normalizer, added = self.me.sum()[0], at.added
        cute.arch.sync_warp()
        self.block.sums.release(at.of_sum, self.me.lane)
        if any_keys:
            self.block.outputs.wait(added)
            self.memory.heard()
            added = added.next()
        else:
            # O lies where Q does, which may be on its way
            self.wait_loads(loaded, Slot(1, Int32(self.me.number), q_slot.phase))
            self.clear()
        for first in cutlass.range_constexpr(0, self.tiling.dv, TAKEN):
            numbers = cute.make_rmem_tensor(TAKEN, Float32)
            taken = self.memory.read(self.me.output() + first, TAKEN)
            for i, value in enumerate(self.arithmetic.times(taken, normalizer)):
                numbers[i] = value
            self.put(first, numbers)
        self.memory.have_read()
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.block.staged.fill(of_tile(self.me.number), self.me.lane)
        return OutputSlots(at.place, added, at.of_sum.next())

    @cute.jit
    def wait_loads(self, loaded: Boolean, q_slot: Slot):
        if const_expr(self.tiling.persistent):
            self.block.q.wait(q_slot)  # also where there was nothing to load: the last O has left
        else:
            if loaded:
                self.block.q.wait(q_slot)

    def clear(self) -> None:
        zeros = cute.make_rmem_tensor(TAKEN, Int32)
        zeros.fill(0)
        for first in range(0, self.tiling.dv, TAKEN):
            self.memory.write(self.me.output() + first, zeros)
        self.memory.written()

    def put(self, first: int, numbers) -> None:
        """Columns of O from `first` on."""
        if self.kernel.plan.direct_store:
            self.store(first, numbers)
            return
        rounded = cute.make_rmem_tensor(TAKEN, self.block.dtype)
        narrow(rounded, numbers)
        start, words = self.block.o_start[self.me.number], cute.recast_tensor(rounded, Int32)
        for i in range(TAKEN // 8):
            four = cute.make_tensor(words.iterator + 4 * i, cute.make_layout(4))
            put_words(start + at_column(self.me.row, first + 8 * i, self.me.rows, self.tiling.dv), four)

    def store(self, first: int, numbers) -> None:
        """Straight to the row: few rows, or few parts."""
        row = self.work.m * self.tiling.tile_m + self.me.number * self.me.rows + self.me.row
        places = RowPlaces(self.tiling, self.kernel.fragment, self.kernel.heads, self.work, row)
        q, h, inside = places.row_place(0)
        target = self.work.queries.head(of_part(self.call.tensors.out, self.work.part), h)
        columns = min(TAKEN, self.kernel.plan.head_dim_v - first)
        _store_row(target, q, first, numbers, columns, inside)


@cute.jit
def _store_row(target, q: Int32, first: cutlass.Constexpr, numbers, columns: cutlass.Constexpr, inside: Boolean):
    if inside:
        for c in cutlass.range_constexpr(0, columns, 8):
            eight = cute.make_tensor(numbers.iterator + c, cute.make_layout(8))
            if const_expr(target.element_type is not Float32):
                rounded = cute.make_rmem_tensor(8, target.element_type)
                narrow(rounded, eight)
                eight = rounded
            cute.autovec_copy(eight, cute.local_tile(target[q, None], (8,), ((first + c) // 8,)))
