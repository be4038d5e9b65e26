"""Rows whose tile of P V is summed apart, and added to the output in fp32: two levels of sums."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import math as cm

from ..fused.kernels.registers.group_rows import GroupRows
from ..fused.kernels.registers.output_rows import LINES
from .wgmma import round_to_e4m3


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

    def round(self, probabilities):
        round_to_e4m3(self.tOrP, probabilities)

    def step(self, n, tested, k_slot, v_slot):
        """The output of the tile before, then scores of kv tile `n`: what holds their sums are the same registers."""
        self.me.turns.take(self.me.number)
        self.last_product(v_slot)
        seen = self.look(n) if tested else None
        ahead = self.mods.read_ahead(self.tile(None, n))
        self.block.k_edge.wait(k_slot)
        tSrS = self.products.issue_scores(self.q_slot, k_slot, self.tSrQ)
        self.me.turns.give(self.me.number)
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
                self.total[r] = cm.fma(self.total[r], self.factor[r], sums[r, columns])

    def normalize(self):
        return self.normalize_by_products() if self.products.adds_probabilities else super().normalize()

    def normalize_by_products(self):
        normalizer = cute.make_rmem_tensor(self.shape.rows, Float32)
        totals = [self.total[r] for r in range(self.shape.rows)]
        self.softmax.normalize_by(normalizer, totals, self.sink_of_row)
        self.multiply(normalizer)

    def settle_factor(self):
        for r in range(self.shape.rows):
            self.factor[r] = self.rescale[r]
