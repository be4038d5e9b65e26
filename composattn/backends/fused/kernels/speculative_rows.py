"""Rows whose probabilities do not wait for a tile's maximum: by the maximum before, and once more if that was low."""

import cutlass
import cutlass.cute as cute

from ....primitives.values import narrow
from .group_rows import Consume, GroupRows


class SpeculativeRows(GroupRows):
    """The same, of a tile that no test is for: its exponentials begin with its scores, its maxima are found under them.

    A row that rises above the maximum before by more than the tiling's `rescale_threshold` has all of the group's rows
    of the tile computed again, from the product on, which K's stage waits for. With 2^24 in its place, outliers lose a
    quarter of their accuracy: a row's largest probability is rounded, where it would be 1.
    """

    def settle(self, tSrS, n, ahead, test, k_slot, v_slot):
        if test is not None:
            super().settle(tSrS, n, ahead, test, k_slot, v_slot)
            return
        before = [self.softmax.total[r] for r in range(self.me.shape.rows)]
        tile = self.tile(self.products.rows_of(tSrS), n)
        self.mods.apply_score(tile, ahead)
        rises = self.softmax.by_maximum_before(tile, self.tiling.rescale_threshold)
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
