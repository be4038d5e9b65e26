"""Rows that guess a tile's maximum: the one before. Few tiles look for theirs: the second one, and some behind each
whose probabilities came out too large.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....primitives.lanes import LANES
from .....primitives.values import choose, narrow, smaller
from .group_rows import GroupRows

# To which power of 2 a thread's probabilities of a row may sum up in a tile. The largest one is rounded, a part of the
# row's error, so it may be large only where that is seldom: with outliers, errors are 1.00 to 1.01 of those of each
# tile's own maximum, and with no limit 1.02 to 1.10. Of N(0, 1) one tile of a thousand is above it.
MOST = 5.0
# Tiles that look for their maximum before one is guessed: behind the first tile, which may have few keys, and behind
# the first failure; each further one has twice as many. Of 8,192 keys whose scores deviate by 2 and 3, 0.8 and 0.5 of
# the tiles are guessed so; by 6 a maximum rises for long, and few are
FIRST, THEN = 1, 8


class GuessingRows(GroupRows):
    """`GroupRows` whose tiles without a test start their exponentials with their scores.

    The tensor core sums what it multiplies, the rounded probabilities, by V's columns of ones: with sums of what was
    rounded later, a row's error would be that of its largest probability, which a guess leaves anywhere between 1 and 2
    times a power of 2, and not at 1. LSE has the sum in fp32.

    A row that rises too far has all of the group's rows of the tile computed again, from the product on, which K's
    stage waits for.
    """

    @cute.jit
    def go_over(self, tile_range, k_slot, v_slot):
        i = Int32(0)
        if const_expr(tile_range.tested):
            i, k_slot, v_slot = self.search(tile_range, i, tile_range.count, k_slot, v_slot)
        else:
            few, more = Int32(FIRST), Int32(THEN)
            while i < tile_range.count:
                i, k_slot, v_slot = self.search(tile_range, i, smaller(i + few, tile_range.count), k_slot, v_slot)
                fails = Boolean(False)
                while (i < tile_range.count) & ~fails:
                    fails = self.guessed_step(tile_range.tile(i), k_slot, v_slot)
                    i += 1
                    k_slot = k_slot.next()
                    v_slot = v_slot.next()
                few, more = more, 2 * more
        return k_slot, v_slot

    @cute.jit
    def search(self, tile_range, i, stop, k_slot, v_slot):
        """Tiles from the i-th to `stop`, each by its own maximum; gives where it ended."""
        while i < stop:
            self.step(tile_range.tile(i), tile_range.tested, k_slot, v_slot)
            i += 1
            k_slot = k_slot.next()
            v_slot = v_slot.next()
        return i, k_slot, v_slot

    def guessed_step(self, n, k_slot, v_slot):
        """`step` by a speculative maximum; returns whether the tile was computed again."""
        ahead, tSrS = self.issue(n, k_slot, v_slot)
        before = [self.softmax.total[r] for r in range(self.me.shape.rows)]
        scores = self.products.remembered(tSrS)
        tile = self.tile(scores, n)
        self.mods.apply_score(tile, ahead)
        rises = self.softmax.by_maximum_before(tile, MOST)
        if self.tiling.output_wait is not None:  # K is read again where rows rise: this releases nothing
            self.block.k_edge.release(k_slot, choose(self.is_negative(scores), Int32(0), Int32(LANES)))
        self.products.wait(0)
        self.block.v_edge.release(v_slot, self.me.lane)
        narrow(self.tOrP, scores)
        # the vote tells the compiler what the barrier does not: all lanes branch alike
        again = cute.arch.vote_any_sync(self.block.of_groups[self.me.number].meet_and_ask(rises))
        self.again_if(again, n, k_slot, before)
        self.block.k_edge.release(k_slot, self.me.lane)
        return again

    @cute.jit
    def again_if(self, condition, n, k_slot, before: cutlass.Constexpr):
        """`before`: sums of rows without the tile."""
        if condition:
            for r, total in enumerate(before):
                self.softmax.total[r] = total
            ahead = self.mods.read_ahead(self.tile(None, n))
            tSrS = self.products.issue_scores(self.q_slot, k_slot, self.tSrQ)
            self.products.wait(0)
            narrow(self.tOrP, self.probabilities(tSrS, n, ahead, False, None, first=False))
            self.rescale_output()

    def normalize(self):
        normalizer = cute.make_rmem_tensor(2, Float32)
        row_lse = cute.make_rmem_tensor(2, Float32)
        kept = self.mods.kept_factor
        self.softmax.finish(normalizer, row_lse, self.sink_of_row, kept)
        rounded = [self.output[r, self.tiling.dv // 4] for r in range(self.me.shape.rows)]
        self.softmax.normalize_by(normalizer, rounded, self.sink_of_row, kept)
        self.tOrO = self.products.without_sums(self.tOrO)
        self.output = self.products.rows_of(self.tOrO)
        self.multiply(normalizer)
        return row_lse
