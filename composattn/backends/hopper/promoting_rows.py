"""Rows whose tile of P V is summed apart, and added to the output in fp32: two levels of sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import math as cm

from ...graph.factors import Scales
from ...primitives.emit import SCALES
from ...primitives.lanes import add, over_lanes
from ...primitives.values import choose
from ..fused.kernels.registers.group_rows import GroupRows
from ..fused.kernels.registers.output_rows import LINES
from .wgmma import round_to_e4m3


class SummedRuns(NamedTuple):
    """Which sums of a tile's probabilities the columns behind the output have: of `runs` of `keys`, one each.

    One run has all columns. Of more, columns `n` and `n + columns` have run `n`, and a lane two columns.
    """

    keys: int
    runs: int

    @staticmethod
    def of(scales: Scales | None, tile_n: int) -> SummedRuns:
        if scales is None or scales.values is None or scales.by_key:  # of each key, the softmax adds up
            return SummedRuns(tile_n, 0)
        return SummedRuns(scales.keys, tile_n // scales.keys)

    @property
    def columns(self) -> int:
        """A power of two, after which columns are the same again."""
        return next(n for n in (1, 2, 4) if n >= self.runs)

    def has(self, row: Any, key: Any) -> Any:
        """Whether a row of ones and zeros has a one at this key of a tile."""
        return row % self.columns == key // self.keys

    @property
    def of_lane(self) -> range:
        """The runs of which a lane has sums, or those that the lane beside it has."""
        return range(min(self.runs, 2))

    def at(self, numbers: Sequence[Any], lane: Any) -> list[Any]:
        """The numbers of runs that belong to a lane's columns."""
        found = [*numbers, *[Float32(0.0)] * (self.columns - len(numbers))]
        if self.columns <= 2:
            return found
        return [choose(lane % 2 == 0, a, b) for a, b in zip(found[:2], found[2:], strict=True)]

    def of_all_lanes(self, total: Any) -> Any:
        """A row's sum, of what each of its lanes has."""
        return total if self.columns <= 2 else over_lanes(add, total, (1,))


class PromotingRows(GroupRows):
    """A tile's scores, softmax and output come one after the other; what lies under them is another group's tile.

    The factor of a tile's maxima waits in `self.factor` until its sums are there: output times factor plus sums is one
    instruction for each number, as a rescale would be.
    """

    def __init__(self, me: Any, mods: Any, work: Any, leaves: Any, q_slot: Any) -> None:
        super().__init__(me, mods, work, leaves, q_slot)
        self.factor = cute.make_rmem_tensor(self.shape.rows, Float32)
        self.factor.fill(1.0)
        self.total = cute.make_rmem_tensor(self.shape.rows, Float32)  # of rounded probabilities, if products add them
        self.total.fill(0.0)
        # what each of the columns of sums is multiplied by, of the tile whose product comes next
        self.back = [cute.make_rmem_tensor(1, Float32) for _ in self.products.summed_runs.of_lane]

    def round(self, probabilities):
        round_to_e4m3(self.tOrP, probabilities)

    def read_beside(self, k_slot, ahead):
        scales = self.block.kept_scales
        if scales is not None:
            ahead[SCALES] = scales.get(k_slot, self.me.lane)

    def note_runs(self, tile):
        if tile.runs is not None and tile.runs.back:
            for kept, back in zip(self.back, self.products.summed_runs.at(tile.runs.back, self.me.lane), strict=True):
                kept[0] = back * tile.runs.near

    def step(self, n, tested, k_slot, v_slot):
        """The output of the tile before, then scores of kv tile `n`: what holds their sums are the same registers."""
        self.me.turns.take(self.me.number)
        self.last_product(v_slot)
        seen = self.look(n) if tested else None
        ahead = self.mods.read_ahead(self.tile(None, n))
        self.block.k_edge.wait(k_slot)
        tSrS = self.products.issue_scores(self.q_slot, k_slot, self.tSrQ)
        self.me.turns.give(self.me.number)
        self.read_beside(k_slot, ahead)
        self.products.wait(0)
        self.block.k_edge.release(k_slot, self.me.lane)
        probabilities = self.probabilities(tSrS, n, ahead, tested, seen, first=False)
        self.round(probabilities)
        self.settle_factor()

    def last_product(self, v_slot):
        self.block.v_edge.wait(v_slot)
        sums = self.products.issue_sums(self.tOrP, v_slot, 0)
        for piece in range(1, self.tiling.pieces):
            others = self.products.issue_sums(self.tOrP, v_slot, piece)
            self.products.wait(1)
            self.promote(sums, piece - 1)
            sums = others
        self.products.wait(0)
        self.block.v_edge.release(v_slot, self.me.lane)
        self.promote(sums, self.tiling.pieces - 1)

    def promote(self, sums, piece):
        """output · factor + sums, in these columns."""
        sums, columns = self.products.rows_of(sums), self.tiling.dv // self.tiling.pieces // LINES
        for r in range(self.shape.rows):
            for c in range(columns):
                place = r, piece * columns + c
                self.output[place] = cm.fma(self.output[place], self.factor[r], sums[r, c])
            if cute.size(sums, mode=[1]) > columns:
                self.total[r] = cm.fma(self.total[r], self.factor[r], self.sum_of_runs(sums, r, columns))

    def sum_of_runs(self, sums, r, first):
        """The sum of a tile's probabilities: without what they have of V's scales, where they do."""
        if not self.back:
            return sums[r, first]
        found = sums[r, first] * self.back[0][0]
        for n, back in enumerate(self.back[1:], first + 1):
            found = cm.fma(sums[r, n], back[0], found)
        return found

    def normalize(self):
        return self.normalize_by_products() if self.products.adds_probabilities else super().normalize()

    def normalize_by_products(self):
        normalizer = cute.make_rmem_tensor(self.shape.rows, Float32)
        totals = [self.products.summed_runs.of_all_lanes(self.total[r]) for r in range(self.shape.rows)]
        if self.back:  # tiles that products did not sum
            by_softmax = (self.shape.along_row(add, self.softmax.total[r]) for r in range(self.shape.rows))
            totals = [a + b for a, b in zip(totals, by_softmax, strict=True)]
        self.softmax.normalize_by(normalizer, totals, self.sink_of_row)
        self.multiply(normalizer)

    def settle_factor(self):
        for r in range(self.shape.rows):
            self.factor[r] = self.rescale[r]
