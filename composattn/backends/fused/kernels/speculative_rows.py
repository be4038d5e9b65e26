"""Rows whose probabilities do not wait for a tile's maximum: by the maximum before, and once more if that was low."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from ....primitives.arithmetic import chains, tree
from ....primitives.online_softmax import finished, finished_with_sink, rescale_rows
from ....primitives.values import narrow
from .group_rows import GroupRows

# By how much, in log2 units, a row's scores may rise above the maximum before them: probabilities reach 2 to its power
MOST_RISE = 24.0
MOST_RISE_FP16 = 14.0  # whose largest number is below 2^16


class SpeculativeRows(GroupRows):
    """The same, of a tile that no test is for: its exponentials begin with its scores.

    A row that rises too far has all of the group's rows of the tile computed again, from the product on, which K's
    stage waits for.
    """

    def __init__(self, me, mods, work, leaves):
        super().__init__(me, mods, work, leaves)
        self.correction = cute.make_rmem_tensor(2, Float32)
        self.correction.fill(0.0)

    @property
    def most(self):
        return MOST_RISE if self.block.dtype is BFloat16 else MOST_RISE_FP16

    def guess(self, tile):
        return self.softmax.by_maximum_before_corrected(tile, self.most, self.correction, self.block.dtype)

    def settle(self, tSrS, n, ahead, test, k_slot, v_slot):
        if test is not None:
            super().settle(tSrS, n, ahead, test, k_slot, v_slot)
            return
        before = [self.softmax.total[r] for r in range(self.me.shape.rows)]
        corrected = [self.correction[r] for r in range(self.me.shape.rows)]
        tile = self.tile(self.products.rows_of(tSrS), n)
        self.mods.apply_score(tile, ahead)
        rises = self.guess(tile)
        self.products.wait(0)
        self.block.v_edge.release(v_slot, self.me.lane)
        narrow(self.tOrP, tSrS)
        if rises is None:
            rises = self.beyond()
        self.again_if(rises, n, k_slot, before, corrected)
        self.block.k_edge.release(k_slot, self.me.lane)

    @cute.jit
    def again_if(self, rises, n, k_slot, before: cutlass.Constexpr, corrected: cutlass.Constexpr):
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
            for r, number in enumerate(corrected):
                self.correction[r] = number * self.rescale[r]

    def normalize(self, normalizer, row_lse):
        self.softmax.finish(normalizer, row_lse, self.sink_of_row, self.mods.kept_factor)
        for r in range(self.me.shape.rows):
            total = self.me.shape.along_row(lambda a, b: a + b, self.softmax.total[r] + self.correction[r])
            normalizer[r] = self.by(r, total)

    def by(self, r, total):
        sink, softmax = self.sink_of_row[r], self.softmax
        if sink is None:
            return finished(softmax.maximum[r], total, softmax.scale)[0]
        return finished_with_sink(softmax.maximum[r], total, softmax.scale, sink)[0]

    def store(self, call):
        """Rows, normalised, to the output; gives LSE of each."""
        normalizer = cute.make_rmem_tensor(2, Float32)
        row_lse = cute.make_rmem_tensor(2, Float32)
        self.normalize(normalizer, row_lse)
        self.tOrO = cute.make_tensor(self.tOrO.iterator, cute.make_layout(self.products.columns_shape))
        self.output = self.products.rows_of(self.tOrO)
        rescale_rows(self.output, normalizer)
        if self.me.plan.direct_store:
            self.store_rows(call)
        else:
            self.store_output(call)
        return row_lse


class SummedRows(SpeculativeRows):
    """The same whose rounded probabilities the matrix unit sums."""

    def guess(self, tile):
        return self.softmax.by_maximum_before(tile, self.most)

    def normalize(self, normalizer, row_lse):
        self.softmax.finish(normalizer, row_lse, self.sink_of_row, self.mods.kept_factor)
        for r in range(self.me.shape.rows):
            normalizer[r] = self.by(r, self.output[r, self.tiling.dv // 4])


class OnlySummedRows(SummedRows):
    """The same with no sums but the matrix unit's."""

    def guess(self, tile):
        for r in range(tile.rows):
            self.softmax.exponentials(tile, r, range(tile.columns))
        return None

    def beyond(self):
        words = cute.recast_tensor(self.tOrP, Int32)
        def most(a, b):
            return cute.arch.inline_ptx("max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])
        largest = tree(most, chains(most, [words[i] for i in range(cute.size(words))]))
        limit = (127 + int(self.most)) << 7
        low, high = largest & 0xFFFF, largest >> 16
        nothing = (self.softmax.maximum[0] == -Float32.inf) | (self.softmax.maximum[1] == -Float32.inf)
        return (low > limit) | (high > limit) | nothing

    def normalize(self, normalizer, row_lse):
        for r in range(self.me.shape.rows):
            normalizer[r], row_lse[r] = finished(self.softmax.maximum[r], self.output[r, self.tiling.dv // 4], self.softmax.scale)
