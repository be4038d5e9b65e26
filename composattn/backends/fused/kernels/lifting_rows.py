"""Rows that guess a tile's maximum, and divide by it what came out too large: nothing is multiplied again."""

import cutlass
import cutlass.cute as cute

from ....primitives.values import narrow
from .guessing_rows import GuessingRows


class LiftingRows(GuessingRows):
    """A row's probabilities are divided by its largest one where that is above 1, and so is what was summed before.

    So the largest one is 1 as by the tile's own maximum, and no other number is rounded twice. Only where a row of the
    group rose beyond fp32, or saw nothing before, is the tile computed again.
    """

    @cute.jit
    def mend(self, tile: cutlass.Constexpr, scores: cutlass.Constexpr, n, k_slot, before: cutlass.Constexpr):
        if self.any_of_group(self.softmax.is_too_far()):
            super().mend(tile, scores, n, k_slot, before)
        else:
            self.softmax.lift(tile, self.rescale)
            narrow(self.tOrP, scores)
