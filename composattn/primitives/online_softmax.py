"""Softmax over tiles: running row maxima and sums in fp32, exact and safe for rows with nothing visible.

Scores come in a unit of which `scale` makes log2 units (p = 2^(scale * s - scale * max)), so that scaling,
subtraction and change of base are one FMA an element (Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018; FlashAttention-2, section 3.1).
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .score_tile import ScoreTile
from .values import Fixed, choose

CHAINS = 4  # independent partial maxima and sums a row, so that latency overlaps


def _tree(op, values):
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _across_lanes(op, value: Float32, lanes: int) -> Float32:
    distance = 1
    while distance < lanes:
        value = op(value, cute.arch.shuffle_sync_bfly(value, distance))
        distance *= 2
    return value


def _fold(op, values):
    result = values[0]
    for value in values[1:]:
        result = op(result, value)
    return result


def _add(a, b):
    return a + b


def _exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


class OnlineSoftmax(Fixed):
    """Row statistics of one thread; `scale` must be positive (a mask's -inf times 0 would be NaN).

    `keeps_highest`: the largest score of each row is kept too, which `maximum` is only within the slack.
    """

    def __init__(self, rows: int, scale: Float32, lanes_per_row: int, keeps_highest: bool = False):
        self.rows = rows
        self.scale = scale
        self.lanes = lanes_per_row
        self.maximum = cute.make_rmem_tensor(rows, Float32)  # of scores, in their own unit
        self.total = cute.make_rmem_tensor(rows, Float32)  # this lane's part of the sum
        self.highest = cute.make_rmem_tensor(rows, Float32) if keeps_highest else None

    def reset(self) -> None:
        self.maximum.fill(-Float32.inf)
        self.total.fill(0.0)
        if self.highest is not None:
            self.highest.fill(-Float32.inf)

    def step(self, tile: ScoreTile, rescale: cute.Tensor, first: bool = False, slack: float = 0.0) -> None:
        """Scores to probabilities, in place; `rescale[r]` gets the factor for what was summed before.

        `first`: nothing was summed before, so `rescale` is left alone. `slack`: a maximum that rose by no more
        than this, in log2 units, is not taken up, and the factor is exactly 1; probabilities then reach
        2^slack, which costs no accuracy in a floating-point format (FlashAttention-4, conditional rescaling).
        """
        for r in range(self.rows):
            scores = [tile.values[r, c] for c in range(tile.columns)]
            chains = [_fold(cute.arch.fmax, scores[i::CHAINS]) for i in range(min(CHAINS, len(scores)))]
            before = self.maximum[r]
            if not first:
                chains.append(before)
            maximum = _across_lanes(cute.arch.fmax, _tree(cute.arch.fmax, chains), self.lanes)
            if self.highest is not None:
                self.highest[r] = cute.arch.fmax(self.highest[r], maximum)
            if slack and not first:
                # false for the NaN of -inf - -inf, and for a first visible score after -inf
                maximum = choose((maximum - before) * self.scale <= slack, before, maximum)
            # a row with nothing visible yet: subtract 0, so that 2^(-inf - 0) is 0 and not NaN
            shift = choose(maximum == -Float32.inf, Float32(0.0), maximum)
            if not first:
                rescale[r] = _exp2((before - shift) * self.scale)
            self.maximum[r] = maximum
            scaled_shift = shift * self.scale
            terms = [_exp2(s * self.scale - scaled_shift) for s in scores]
            for c, p in enumerate(terms):
                tile.values[r, c] = p
            if not first:
                terms = [self.total[r] * rescale[r], *terms]
            self.total[r] = _tree(_add, [_fold(_add, terms[i::CHAINS]) for i in range(min(CHAINS, len(terms)))])

    def finish(self, normalizer: cute.Tensor, lse: cute.Tensor) -> None:
        """`normalizer[r]` gets 1 / sum, `lse[r]` the natural logarithm of the sum of exponentials.

        A row with nothing visible gets normalizer 0 (so O = 0) and LSE = -inf; NaN stays NaN.
        """
        for r in range(self.rows):
            total = _across_lanes(_add, self.total[r], self.lanes)
            nothing = self.maximum[r] == -Float32.inf
            nothing = nothing & (total == 0.0)
            normalizer[r] = choose(nothing, Float32(0.0), cute.arch.rcp_approx(total))
            log2 = self.maximum[r] * self.scale + cute.math.log2(total, fastmath=True)
            lse[r] = choose(nothing, -Float32.inf, log2 * math.log(2.0))

    def highest_scores(self, lse: cute.Tensor) -> list[Float32]:
        """The largest score of each row as lse has them, natural units; NaN, which no maximum shows, where lse is."""
        assert self.highest is not None, "keeps_highest was not asked for"
        found = []
        for r in range(self.rows):
            highest = self.highest[r] * self.scale * math.log(2.0)
            known = (lse[r] == lse[r]) | (highest == Float32.inf)
            found.append(choose(known, highest, lse[r]))
        return found


def rescale_rows(accumulator: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiplies row r of a (row, column) view by `factors[r]`."""
    for r in range(cute.size(accumulator, mode=[0])):
        for c in range(cute.size(accumulator, mode=[1])):
            accumulator[r, c] = accumulator[r, c] * factors[r]


@cute.jit
def rescale_rows_if_needed(accumulator: cute.Tensor, factors: cute.Tensor):
    """`rescale_rows`, left out by warps of which no row needs it."""
    needed = factors[0] != 1.0
    for r in cutlass.range_constexpr(1, cute.size(factors)):
        needed = needed | (factors[r] != 1.0)
    if cute.arch.vote_any_sync(needed):
        rescale_rows(accumulator, factors)
