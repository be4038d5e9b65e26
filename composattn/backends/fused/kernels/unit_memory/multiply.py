"""A forward's warp that multiplies, where products lie in memory of the tensor core: S = Q Kᵀ and O += P V."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .....primitives.pipelines import Slot
from .....primitives.values import Bundle
from ..forward import Role
from .query_tile import of_tile


class Progress(Bundle):
    """Progress of one query tile: the places of its next scores and probabilities, whether there are such, and whether
    O has anything yet.
    """

    parts = ("ahead", "ready", "waiting", "begun")

    def __init__(self, ahead: Slot, ready: Slot, waiting: Int32, begun: Int32) -> None:
        self.ahead, self.ready, self.waiting, self.begun = ahead, ready, waiting, begun

    def with_scores(self) -> "Progress":
        return Progress(self.ahead.next(), self.ready, Int32(1), self.begun)

    def with_output(self) -> "Progress":
        return Progress(self.ahead, self.ready.next(), Int32(0), Int32(1))

    def for_next_work(self) -> "Progress":
        return Progress(self.ahead, self.ready, Int32(0), Int32(0))


class Multiply(Role):
    """At kv tile j: O += P V of tile j - 1, then scores of tile j, for each query tile that needs them.

    With two places for scores these come first. The kernel's `products` of a query tile start both: `issue_scores` says
    by the edge `scores` when they are there, `issue_output` waits for the probabilities on `early` and `late`.
    """

    def __init__(self, kernel, call, block):
        super().__init__(kernel, call, block)
        self.memory = kernel.first_column(block)

    def first_slots(self):
        progress = (
            Progress(self.block.place(t), self.block.place(t), Int32(0), Int32(0))
            for t in range(self.tiling.query_tiles)
        )
        slots = Slot.first(1), Slot.first(self.tiling.k_stages), Slot.first(self.tiling.v_stages)
        return (*progress, *slots)

    @cute.jit
    def visit(self, work, slots):
        block = self.block
        at, q_slot, k_slot, v_slot = slots[:-3], slots[-3], slots[-2], slots[-1]
        shared = self.kernel.tiles_of_all(self.call, work)
        products = [self.kernel.products(block, self.memory, t) for t in range(self.tiling.query_tiles)]
        if shared.all.count > 0:
            block.k.wait(k_slot)
            for t in cutlass.range_constexpr(len(products)):
                block.q.wait(Slot(1, Int32(t), q_slot.phase))
            at = self.first_scores(shared, products, at, k_slot)
            block.k.release(k_slot, None)
            k_slot = k_slot.next()
            for i in cutlass.range(1, shared.all.count, unroll=1):
                tile = shared.all.tile(i) if self.kernel.apart else None
                if const_expr(self.tiling.score_places == 1):
                    block.v.wait(v_slot)
                    at = self.turns(shared, tile, products, at, k_slot, v_slot)
                    block.v.release(v_slot, None)
                    block.k.release(k_slot, None)
                else:
                    at = (self.turn_ahead(products[0], at[0], k_slot, v_slot),)
                k_slot, v_slot = k_slot.next(), v_slot.next()
            block.v.wait(v_slot)
            at = self.last_outputs(products, at, v_slot)
            block.v.release(v_slot, None)
            v_slot = v_slot.next()
        return (*(progress.for_next_work() for progress in at), q_slot.next(), k_slot, v_slot)

    def first_scores(self, shared, products, at, k_slot):
        return tuple(self.scores(shared.needs(t, shared.all.first), p, at[t], k_slot) for t, p in enumerate(products))

    def turns(self, shared, tile, products, at, k_slot, v_slot):
        return tuple(self.turn(shared.needs(t, tile), p, at[t], k_slot, v_slot) for t, p in enumerate(products))

    def last_outputs(self, products, at, v_slot):
        return tuple(self.last_output(p, at[t], v_slot) for t, p in enumerate(products))

    def turn(self, needed, products, progress, k_slot, v_slot):
        """What was multiplied of a query tile's last scores makes room for its next ones."""
        progress = self.output(products, progress, v_slot)
        if products.tile == 0:
            self.block.k.wait(k_slot)
        return self.scores(needed, products, progress, k_slot)

    def turn_ahead(self, products, progress, k_slot, v_slot):
        """The next scores have a place of their own."""
        self.block.k.wait(k_slot)
        ahead = self.scores(True, products, progress, k_slot).ahead
        self.block.k.release(k_slot, None)
        self.block.v.wait(v_slot)
        after = self.last_output(products, progress, v_slot)
        self.block.v.release(v_slot, None)
        return Progress(ahead, after.ready, Int32(1), after.begun)

    @cute.jit
    def last_output(self, products, progress, v_slot):
        """For now: the correction may have it, if there is any."""
        progress = self.output(products, progress, v_slot)
        if const_expr(not self.kernel.apart):
            self.block.outputs.fill(of_tile(products.tile))
        else:
            if progress.begun > 0:
                self.block.outputs.fill(of_tile(products.tile))
        return progress

    @cute.jit
    def scores(self, needed, products, progress, k_slot):
        """Scores of a kv tile, if the query tile needs it."""
        if const_expr(needed is True):
            products.issue_scores(progress.ahead, k_slot)
            progress = progress.with_scores()
        else:
            if needed:
                products.issue_scores(progress.ahead, k_slot)
                progress = progress.with_scores()
        return progress

    @cute.jit
    def output(self, products, progress, v_slot):
        """With the kv tile of which there are probabilities, if there are."""
        if const_expr(not self.kernel.apart):
            products.issue_output(progress.ready, v_slot, progress.begun > 0)
            progress = progress.with_output()
        else:
            if progress.waiting > 0:
                products.issue_output(progress.ready, v_slot, progress.begun > 0)
                progress = progress.with_output()
        return progress
