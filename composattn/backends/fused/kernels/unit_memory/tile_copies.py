"""A forward's warps that copy where others multiply: Q, K and V in, O out."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, const_expr

from .....primitives.cut_rows import load, partition, store
from .....primitives.pipelines import Slot
from ..forward import KeyCopies, Role
from .query_tile import of_tile


class TileLoad(Role):
    """Q once a work tile, K tile by tile, V one tile behind K, as products want them."""

    def first_slots(self):
        slots = tuple(of_tile(t) for t in range(self.tiling.query_tiles))
        return (*slots, Slot.first(self.tiling.k_stages), Slot.first(self.tiling.v_stages))

    @cute.jit
    def visit(self, work, slots):
        tiling, block, tmas, tensors = self.tiling, self.block, self.call.tmas, self.call.tensors
        q_slots, k_slot, v_slot = slots[:-2], slots[-2], slots[-1]
        tiles = self.kernel.tiles_of_all(self.call, work).all
        gQ = work.queries.tiles(tensors.q, work.h, (self.kernel.heads.box(self.kernel.rows), tiling.d))
        copies = KeyCopies(self, work, (block.k, block.v), (block.sK, block.sV))
        if const_expr(tiling.persistent):
            for slot in q_slots:
                block.q.wait_empty(slot)  # also where there is nothing to load: O will lie there
        if tiles.count > 0:
            before = copies.source.locate(tiles.first)
            for t in cutlass.range_constexpr(tiling.query_tiles):
                block.q.fill(q_slots[t])
                tQsQ, tQgQ = partition(tmas.q, block.q_rows[t], gQ)
                number = work.m * tiling.query_tiles + t
                load(tmas.q, tQgQ, number, tQsQ, block.q.full + t)
                if const_expr(t == 0):
                    copies.start_keys(before, k_slot)
            k_slot = k_slot.next()
            for i in cutlass.range(1, tiles.count, unroll=1):
                at = copies.source.locate(tiles.tile(i))
                k_slot, v_slot = copies.follow(at, before, k_slot, v_slot)
                before = at
            copies.start_values(before, v_slot)
            v_slot = v_slot.next()
        elif const_expr(tiling.persistent):
            for t in cutlass.range_constexpr(tiling.query_tiles):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.q.full + t)
        return (*(slot.next() for slot in q_slots), k_slot, v_slot)


class Store(Role):
    """O by bulk copies, which leave out what is no query."""

    def first_slots(self):
        return tuple(of_tile(t) for t in range(self.tiling.query_tiles))

    @cute.jit
    def visit(self, work, slots):
        tiling, block, out = self.tiling, self.block, self.call.tmas.out
        for t in cutlass.range_constexpr(tiling.query_tiles):
            block.staged.wait(slots[t])
            if const_expr(out is not None):
                gO = work.queries.tiles(
                    self.call.tensors.out, work.h, (self.kernel.heads.box(self.kernel.rows), tiling.dv)
                )
                source, target = partition(out, block.o_rows[t], gO)
                store(Boolean(True), out, source, target, work.m * tiling.query_tiles + t)
        if const_expr(out is not None):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        for slot in slots:
            block.q.release(slot, cute.arch.lane_idx())
        return tuple(slot.next() for slot in slots)
