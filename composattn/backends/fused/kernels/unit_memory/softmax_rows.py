"""The softmax of a forward whose scores lie in memory of the tensor core, a row a thread; probabilities go there."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....primitives.exponential_units import HARDWARE
from .....primitives.online_softmax import OnlineSoftmax, largest_scores
from .....primitives.pipelines import Slot
from .....primitives.score_tile import ScoreTile
from .....primitives.values import narrow
from ...tiles.traits import reads
from ..forward import Role
from ..query_rows import QueryRows
from .query_tile import QueryTile, of_tile


class Softmax(Role):
    """A group for each query tile, of a thread a row, all with the same code: the first threads of the block."""

    def __init__(self, kernel, call, block):
        super().__init__(kernel, call, block)
        thread = cute.arch.thread_idx()[0]
        tile, thread = cute.arch.make_warp_uniform(thread // kernel.rows), thread % kernel.rows
        self.me = QueryTile(block, kernel.memory(block, thread), tile, thread, kernel.rows)
        self.scale_log2 = kernel.mods.softmax_scale_log2(call.scale)

    def first_slots(self):
        return self.block.place(self.me.number), of_tile(self.me.number)

    @cute.jit
    def visit(self, work, slots):
        """All kv tiles; then the normalizer follows the factors."""
        place, of_sum = slots
        tiles = self.kernel.tiles_of(self.call, work, self.me.number)
        row = SoftmaxRow(self, work, self.call.leaves(work, self.tiling.queries))
        i, far = Int32(0), Boolean(False)
        while i < tiles.count:
            for test in row.tests_of(tiles):
                if const_expr(row.bends and not test.tested):
                    while test.goes_on(i) & ~far:
                        far = row.step_if_near(tiles.tile(i), test, place)
                        if ~far:
                            i, place = i + 1, place.next()
                else:
                    while test.goes_on(i, far if row.bends else None):
                        row.step(tiles.tile(i), test, place)
                        i, place, far = i + 1, place.next(), Boolean(False)
        row.finish(self.call, of_sum)
        return place, of_sum.next()


class SoftmaxRow(QueryRows[Any]):
    """A thread's row of a work tile.

    Of each kv tile: scores | factor to the correction | first probabilities to tensor memory | the others | their sum
    """

    def __init__(self, role: Softmax, work, leaves):
        kernel, me = role.kernel, role.me
        row = work.m * role.tiling.tile_m + me.number * me.rows + me.row
        super().__init__(role.tiling, kernel.fragment, kernel.heads, kernel.mods, work, leaves, row, Int32(0))
        self.me, self.memory, self.block, self.kernel = me, me.memory, role.block, kernel
        self.reads = bool(reads(kernel.plan.program.score))
        # what is read ahead for a tile that another step then has would be read twice
        self.bends = kernel.mods.steepest is not None and not self.reads
        highest, units = kernel.plan.return_max_scores, role.tiling.exponential
        arithmetic, least, threshold = kernel.mods.arithmetic, kernel.mods.least_score, self.tiling.threshold
        factors = self.block.dtype
        self.softmax = OnlineSoftmax(self.shape, role.scale_log2, highest, units, arithmetic, least, threshold, factors)
        self.softmax.reset()

    def step(self, n, test, place: Slot) -> None:
        """A kv tile that takes `test`."""
        ahead, seen = self.mods.read_ahead(self.tile(None, n)), test.look(self.tile(None, n))
        tile, loaded = self.load(n, test, place)
        self.mods.apply_score(tile, ahead, all_visible=not test.tested)
        test.hide(tile, seen)
        self.probabilities(tile, loaded, place)

    @cute.jit
    def step_if_near(self, n, test, place: Slot):
        """A tile without a test, if each tanh of its scores is a polynomial; gives whether one is not.

        Then nothing was done, and a step that takes tests, which hide nothing here, has the whole tile: a branch to
        another tanh in the middle of a tile is predicated, both ways of it (2,100 instructions for 1,100).
        """
        tile, loaded = self.load(n, test, place)
        far = cute.arch.vote_any_sync(~self.mods.is_near(loaded))
        if ~far:
            self.mods.apply_score(tile, {}, all_visible=True, near=True)
            self.probabilities(tile, loaded, place, HARDWARE)  # the scores left that unit free
        return far

    def load(self, n, test, place: Slot):
        """Raw scores of a tile as a thread's row, and as loaded, with their maxima where the load has them."""
        self.block.scores.wait(place)
        self.memory.heard()
        values = cute.make_rmem_tensor((1, self.tiling.tile_n), Float32)
        by_load = self.tiling.maximum_by_load and not test.tested and not self.kernel.mods.changes_scores
        read = self.memory.read_with_maxima if by_load else self.memory.read
        loaded = read(self.me.scores(place), self.tiling.tile_n)
        for c in range(self.tiling.tile_n):
            values[0, c] = loaded[c]
        return self.tile(values, n), loaded

    def probabilities(self, tile, loaded, place: Slot, units=None) -> None:
        """Scores to probabilities, `units` for exponentials if not the plan's.

        With a tanh, a row's sum is multiplied by its factor at once, and has the first 32 probabilities before any is
        stored: what waits for the tile's end has registers (11 and 2 spilled). It takes 2 more instructions.
        """
        me, block, early = self.me, self.block, self.tiling.early_keys
        every = range(self.tiling.tile_n)
        among = loaded[len(every) :] or largest_scores(tile, 0)
        rise = self.softmax.raise_maximum(0, among)
        if self.reads:
            block.scores.wait(place)  # they are there; but the compiler moves no read over a wait: 41 spilled
        me.factor(place)[0] = rise
        if self.bends:
            self.softmax.lower(0, rise)
        cute.arch.sync_warp()
        block.factors.fill(place, me.lane)
        self.softmax.exponentials(tile, 0, every[:early], units)
        if self.bends:
            self.softmax.add_to_lowered(tile, 0, every[:32])
        self.put(tile, 0, early, place)
        block.early.fill(place, me.lane)
        self.softmax.exponentials(tile, 0, every[early:], units)
        self.put(tile, early, len(every) - early, place)
        block.late.fill(place, me.lane)
        if self.bends:
            self.softmax.add_to_lowered(tile, 0, every[32:])
        else:
            self.softmax.add(tile, 0, rise)

    def put(self, tile: ScoreTile, start: int, count: int, place: Slot) -> None:
        """Probabilities of so many keys, from `start` on, two in a column."""
        rounded = cute.make_rmem_tensor(count, self.block.dtype)
        narrow(rounded, self.mods.weights(tile, start, count))
        self.memory.write(self.me.scores(place) + start // 2, cute.recast_tensor(rounded, Int32))
        self.memory.written()
        cute.arch.sync_warp()

    def finish(self, call, of_sum: Slot) -> None:
        """The normalizer to the correction, what is asked for of LSE and the largest score to their tensors."""
        normalizer = cute.make_rmem_tensor(1, Float32)
        row_lse = cute.make_rmem_tensor(1, Float32)
        self.softmax.finish(normalizer, row_lse, self.sinks(), self.mods.kept_factor)
        self.block.sums.wait_empty(of_sum)
        self.me.sum()[0] = normalizer[0]
        cute.arch.sync_warp()
        self.block.sums.fill(of_sum, self.me.lane)
        self.store_statistics(call, self.softmax, row_lse, self.me.lane)
