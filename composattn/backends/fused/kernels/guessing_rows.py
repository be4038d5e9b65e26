"""Rows that guess a tile's maximum: the one before. Nobody looks for one unless probabilities come out too large."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ....primitives.online_softmax import rescale_rows
from ....primitives.values import choose, narrow
from .group_rows import GroupRows

# To which power of 2 a thread's probabilities of a row may sum up in a tile. In bf16, whose exponents are fp32's,
# values may still reach 2^60; in fp16 they must stay below 2^16.
MOST, MOST_FP16 = 64.0, 14.0
# Tiles of a work tile that are computed again, after which its other ones look for their maximum first
PATIENCE = 3


class GuessingRows(GroupRows):
    """The same, but for tiles that no test is for: their exponentials begin with their scores.

    The matrix unit sums what it multiplies, the rounded probabilities, by V's columns of ones: with sums of what was
    rounded later, a row's error would be that of its largest probability, which a guess leaves anywhere between 1 and 2
    times a power of 2, and not at 1. LSE has the sum in fp32.

    A row that rises too far has all of the group's rows of the tile computed again, from the product on, which K's
    stage waits for.
    """

    @cute.jit
    def go_over(self, segment, k_slot, v_slot):
        i = Int32(0)
        if const_expr(not segment.tested):
            again = Int32(0)
            while (i < segment.count) & (again < PATIENCE):
                again = again + self.guessed_step(segment.tile(i), k_slot, v_slot)
                i += 1
                k_slot = k_slot.next()
                v_slot = v_slot.next()
        while i < segment.count:
            self.step(segment.tile(i), segment.tested, k_slot, v_slot)
            i += 1
            k_slot = k_slot.next()
            v_slot = v_slot.next()
        return k_slot, v_slot

    def guessed_step(self, n, k_slot, v_slot):
        """As `step`; gives 1 if the tile was computed again, else 0."""
        ahead, tSrS = self.issue(n, k_slot, v_slot)
        before = [self.softmax.total[r] for r in range(self.me.shape.rows)]
        scores = self.products.remembered(tSrS)
        tile = self.tile(scores, n)
        self.mods.apply_score(tile, ahead)
        most = MOST if self.block.dtype is BFloat16 else MOST_FP16
        rises = self.softmax.by_maximum_before(tile, most)
        self.products.wait(0)
        self.block.v_edge.release(v_slot, self.me.lane)
        narrow(self.tOrP, scores)
        # the vote tells the compiler what the barrier does not: all lanes branch alike
        again = cute.arch.vote_any_sync(self.block.of_groups[self.me.number].meet_and_ask(rises))
        self.again_if(again, n, k_slot, before)
        self.block.k_edge.release(k_slot, self.me.lane)
        return choose(again, Int32(1), Int32(0))

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
        rescale_rows(self.output, normalizer)
        return row_lse
