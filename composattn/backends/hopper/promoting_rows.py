"""Rows whose tile of P V is summed apart, and added to the output in fp32: two levels of sums."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import math as cm

from ...primitives.e4m3_powers import E4m3Softmax
from ...primitives.emit import SCALES
from ...primitives.emit_scales import TileScales
from ...primitives.exponential_units import ExponentialUnits
from ...primitives.row_lines import LINES
from ..fused.kernels.registers.group_rows import GroupRows
from .wgmma import round_to_e4m3


class PromotingRows(GroupRows):
    """A tile's scores, softmax and output come one after the other; what lies under them is another group's tile.

    The factor of a tile's maxima waits in `self.factor` until its sums are there: output times factor plus sums is one
    instruction for each number, as a rescale would be. Where each tile has a scale of V, that factor brings the output
    to the unit of the tile, which costs nothing more.
    """

    def __init__(self, me: Any, mods: Any, work: Any, leaves: Any, q_slot: Any) -> None:
        super().__init__(me, mods, work, leaves, q_slot)
        self.factor = cute.make_rmem_tensor(self.shape.rows, Float32)
        self.factor.fill(1.0)
        self.total = cute.make_rmem_tensor(self.shape.rows, Float32)  # of rounded probabilities, if products add them
        self.total.fill(0.0)
        # V's scale in which the output is kept, that of the tile before, over which it is in the next one's
        self.unit, self.change = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        self.unit.fill(1.0)
        self.change.fill(1.0)

    @property
    def units(self):
        return ExponentialUnits(self.tiling.logarithms * self.products.adds_probabilities, 8, degree=1)

    @property
    def softmax_type(self):
        return E4m3Softmax if self.units.polynomial else super().softmax_type

    def round(self, probabilities):
        round_to_e4m3(self.tOrP, probabilities, self.units)

    def read_beside(self, k_slot, ahead):
        scales = self.block.kept_scales
        if scales is not None:
            read = ahead[SCALES] = scales.get(k_slot, self.me.lane)
            if read.unit is not None:
                self.unit[0], self.change[0] = read.unit, read.change

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
            factor = self.factor[r] * self.change[0] if self.has_unit else self.factor[r]
            for c in range(columns):
                place = r, piece * columns + c
                self.output[place] = cm.fma(self.output[place], factor, sums[r, c])
            if cute.size(sums, mode=[1]) > columns:
                self.total[r] = cm.fma(self.total[r], self.factor[r], sums[r, columns])

    @property
    def has_unit(self):
        """Whether V's scales are those of tiles."""
        return isinstance(self.block.kept_scales, TileScales) and self.block.kept_scales.scales.values is not None

    def multiply(self, normalizer):
        if self.has_unit:
            for r in range(self.shape.rows):
                normalizer[r] = normalizer[r] * self.unit[0]
        super().multiply(normalizer)

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
