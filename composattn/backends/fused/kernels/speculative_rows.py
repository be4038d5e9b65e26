"""Rows whose probabilities do not wait for a tile's maximum: by the maximum before, and once more if that was low."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16

from ....primitives.values import narrow
from .group_rows import Consume, GroupRows

# By how much, in log2 units, a row's scores may rise above the maximum before them: probabilities reach 2 to its power
MOST_RISE = 24.0
MOST_RISE_FP16 = 14.0  # whose largest number is below 2^16


class SpeculativeRows(GroupRows):
    """The same, of a tile that no test is for: its exponentials begin with its scores, its maxima are found under them.

    A row that rises too far has all of the group's rows of the tile computed again, from the product on, which K's
    stage waits for.
    """

    def settle(self, tSrS, n, ahead, test, k_slot, v_slot):
        if test is not None:
            super().settle(tSrS, n, ahead, test, k_slot, v_slot)
            return
        before = [self.softmax.total[r] for r in range(self.me.shape.rows)]
        tile = self.tile(self.products.rows_of(tSrS), n)
        self.mods.apply_score(tile, ahead)
        most = MOST_RISE if self.block.dtype is BFloat16 else MOST_RISE_FP16
        rises = self.softmax.by_maximum_before(tile, most)
        self.mods.drop(tile)
        self.products.wait(0)
        self.block.v_edge.release(v_slot, self.me.lane)
        narrow(self.tOrP, tSrS)
        self.again_if(rises, n, k_slot, before)
        self.block.k_edge.release(k_slot, self.me.lane)

    @cute.jit
    def again_if(self, rises, n, k_slot, before: cutlass.Constexpr):
        """Of any thread; `before`: sums of rows without the tile."""
        somewhere = self.block.of_groups[self.me.number].meet_and_ask(rises)
        # the vote tells the compiler what the barrier does not: all lanes branch alike
        if cute.arch.vote_any_sync(somewhere):
            for r, total in enumerate(before):
                self.softmax.total[r] = total
            ahead = self.mods.read_ahead(self.tile(None, n))
            tSrS = self.products.issue_scores(k_slot)
            self.products.wait(0)
            self.probabilities(tSrS, n, ahead, None, first=False)
            narrow(self.tOrP, tSrS)
            self.rescale_output()


class ConsumeSpeculatively(Consume):
    """A group's rows of each work tile, likewise."""

    rows = SpeculativeRows
