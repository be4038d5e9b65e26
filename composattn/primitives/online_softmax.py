"""Softmax over tiles: running row maxima and sums in fp32, exact and safe for rows with nothing visible.

Scores come in a unit that `scale` turns into log2 units (p = 2^(scale * s - scale * max)), so that scaling,
subtraction and change of base are one FMA per element (Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018; FlashAttention-2, section 3.1).
"""

import math
from collections.abc import Sequence
from operator import add
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass._mlir.dialects import arith
from cutlass._mlir.dialects import cute as language
from cutlass.cute import math as cm

from .arithmetic import ONE_BY_ONE, Arithmetic, chains, tree
from .exponential import LN_2, LOG2_E, exp2, exp2_of_columns, log2
from .exponential_units import HARDWARE, ExponentialUnits
from .rescale_threshold import ALWAYS_RESCALE, RescaleThreshold
from .score_tile import FragmentShape, Lifts, ScoreTile
from .values import Fixed, choose


class OnlineSoftmax(Fixed):
    """Row statistics of one thread; `scale` must be positive (a mask's -inf times 0 would be NaN).

    A step of a row is three calls: `raise_maximum`, whose factor whoever holds the output may have before there is any
    exponential; `exponentials`, of all columns or of some at a time; and `add`. `units` say what computes the
    exponentials, `arithmetic` what comes before and behind them. `keeps_highest`: the largest score of each row is kept
    too. `least`: a row whose maximum is below it, in the unit of scores, has nothing to attend.

    `threshold`: how far a maximum may be below a row's largest score; the factor is exactly 1 then. What it says of
    sums goes by those of the last `note_sums`.

    `factors`: the 16-bit type that probabilities are rounded to behind their sum, as factors of the output's product.
    Of a row whose largest score has nearly all of the sum the output is right only if the sum has that probability as
    it was rounded: 1 but for the rounding of the shift, 2^-24 of it, 2^-11 at scores of 10^4. Gradients of such rows
    are all dP - rowsum(dO·O), which is 0 of one key.

    `offset`: probabilities, their sums and the output are 2 to this power as large until the row ends, so that a type
    of few exponents holds more of them. `adds`: whether a step adds probabilities up, which else a product does.

    `row_scales`: numbers by which `scale` is multiplied in each row, if any; who knows them later writes them there.
    """

    def __init__(
        self,
        shape: FragmentShape,
        scale: Float32,
        keeps_highest: bool = False,
        units: ExponentialUnits = HARDWARE,
        arithmetic: Arithmetic = ONE_BY_ONE,
        least: float = -math.inf,
        threshold: RescaleThreshold = ALWAYS_RESCALE,
        factors: Any = None,
        offset: float = 0.0,
        adds: bool = True,
        row_scales: cute.Tensor | None = None,
    ) -> None:
        self.row_scales = row_scales
        self.shape, self.scale, self.units, self.arithmetic = shape, scale, units, arithmetic
        self.offset, self.adds = offset, adds
        self.least, self.threshold, self.factors = least, threshold, factors
        rows = shape.rows
        self.maximum = cute.make_rmem_tensor(rows, Float32)  # of scores, in their own unit
        self.total = cute.make_rmem_tensor(rows, Float32)  # this lane's part of the sum
        self.scaled_shift = cute.make_rmem_tensor(rows, Float32)  # what exponents are less, in log2 units
        self.highest = cute.make_rmem_tensor(rows, Float32) if keeps_highest else None
        # of scores that raise no maximum
        self.limit = None if threshold.share is None else cute.make_rmem_tensor(rows, Float32)

    def scale_of(self, r: int) -> Any:
        """What turns scores of row `r` into log2 units."""
        return self.scale if self.row_scales is None else self.scale * self.row_scales[r]

    def reset(self) -> None:
        self.maximum.fill(-Float32.inf)
        self.total.fill(0.0)
        if self.limit is not None:
            self.limit.fill(-Float32.inf)
        if self.highest is not None:
            self.highest.fill(-Float32.inf)

    def step(self, tile: ScoreTile, rescale: cute.Tensor, first: bool = False) -> None:
        """Scores to probabilities, in place; `rescale[r]` gets the factor for what was summed before.

        `first`: nothing was summed before, so `rescale` is left alone.
        """
        factors = []
        for r in range(tile.rows):
            own = [] if self.highest is None else largest_of_their_own(tile, r)
            factor = self.raise_maximum(r, largest_scores(tile, r), first, own)
            factors.append(factor)
            if factor is not None:
                rescale[r] = factor
            self.exponentials(tile, r, range(tile.columns))
            if self.adds and tile.lifts is None:
                self.add(tile, r, factor)
        if tile.lifts is not None:
            self.add_lifted(tile, tile.lifts, factors)

    def by_maximum_before(self, tile: ScoreTile, most: float) -> Any:
        """Scores to probabilities, in place, by the maximum that each row had before this tile, which it keeps.

        Nobody looks for the tile's, and no lane waits for another. Returns whether the thread's probabilities of a row
        sum up to more than 2 to the power `most`, or nothing was visible before: then they and the sums are of no use.
        """
        rises = Boolean(False)
        for r in range(tile.rows):
            if self.highest is not None:
                largest = tree(cute.arch.fmax, chains(cute.arch.fmax, largest_scores(tile, r)))
                self.highest[r] = cute.arch.fmax(self.highest[r], self.shape.along_row(cute.arch.fmax, largest))
            self.exponentials(tile, r, range(tile.columns))
            added = self.arithmetic.total(None, [tile.values[r, c] for c in range(tile.columns)])
            rises = rises | (added > 2.0**most) | self._is_hidden(self.maximum[r])
            self.total[r] = self.total[r] + added
        return rises

    def raise_maximum(self, r: int, scores: Sequence[Any], first: bool = False, own: Sequence[Any] = ()) -> Any:
        """Takes the largest of `scores` (all of the thread's in row `r`, or its maximum alone) up in the row's maximum.

        `own`: the scores without what was added for V, if that was. Returns the factor for what was summed before,
        None at the `first` tile.
        """
        return self.raise_to(r, self.maximum_with(r, scores, first, own), first)

    def maximum_with(self, r: int, scores: Sequence[Any], first: bool = False, own: Sequence[Any] = ()) -> Any:
        """What `raise_maximum` raises the maximum to: the largest score of all lanes, unless it may lag behind."""
        before = self.maximum[r]
        among = chains(cute.arch.fmax, scores) + ([] if first else [before])
        largest = self.shape.along_row(cute.arch.fmax, tree(cute.arch.fmax, among))
        if self.highest is not None:
            of_own = self.shape.along_row(cute.arch.fmax, tree(cute.arch.fmax, list(own))) if own else largest
            self.highest[r] = cute.arch.fmax(self.highest[r], of_own)
        if first or not self.threshold.most:
            return largest
        if self.limit is not None:
            return choose(largest > self.limit[r], largest, before)
        # false for the NaN of -inf - -inf, and for a first visible score after -inf
        return choose((largest - before) * self.scale_of(r) <= self.threshold.most, before, largest)

    def raise_to(self, r: int, maximum: Any, first: bool = False) -> Any:
        """`raise_maximum` to a given value, which is the row's maximum from now on."""
        before = self.maximum[r]
        # a row with nothing visible yet: subtract 0, so that 2^(-inf - 0) is 0 and not NaN
        shift = choose(self._is_hidden(maximum), Float32(0.0), maximum)
        factor = None if first else exp2((before - shift) * self.scale_of(r))
        self.maximum[r] = maximum
        self.scaled_shift[r] = self._less(shift * self.scale_of(r), self.offset)
        return factor

    def join(self, r: int, maximum: Any, total: Any, highest: Any) -> tuple[Any, Any]:
        """Takes in what another softmax has of the row's other keys, this lane's part of its sum.

        Returns the factors for what was summed before, and for what the other one did.
        """
        if self.highest is not None:
            self.highest[r] = cute.arch.fmax(self.highest[r], highest)
        own = self.raise_to(r, cute.arch.fmax(self.maximum[r], maximum))
        other = exp2(maximum * self.scale_of(r) - self._less(self.scaled_shift[r], -self.offset))
        self.total[r] = self.total[r] * own + total * other
        return own, other

    def note_sums(self, ahead: Any) -> None:
        """How far each row's maximum may lag from now on; sums grow to `ahead` times themselves, if tiles are alike."""
        assert self.limit is not None and self.threshold.share is not None, "maxima lag whatever sums are"
        share, log2_unit = ahead * self.threshold.share, cute.arch.rcp_approx(self.scale)
        for r in range(self.shape.rows):
            if self.row_scales is not None:
                log2_unit = cute.arch.rcp_approx(self.scale_of(r))
            # -inf of a row that has seen nothing: any score is above it
            threshold = log2(self.shape.along_row(add, self.total[r]) * share)
            self.limit[r] = self.maximum[r] + cute.arch.fmin(threshold, Float32(self.threshold.most)) * log2_unit

    def exponentials(
        self, tile: ScoreTile, r: int, columns: Sequence[int], units: ExponentialUnits | None = None
    ) -> None:
        """Scores of row `r` in these of the thread's columns to probabilities, in place; by other `units` if given."""
        for some, factor, lift in tile.runs_of(r, columns):
            shift = self.scaled_shift[r] if lift is None else self.scaled_shift[r] - lift * self.scale_of(r)
            scale = self.scale_of(r) if factor is None else factor * self.scale_of(r)
            exponents = self.arithmetic.scaled((tile.values[r, c] for c in some), scale, shift)
            found = exp2_of_columns(units or self.units, some, exponents, self.arithmetic)
            for c, probability in zip(some, found, strict=True):
                tile.values[r, c] = probability

    def add(self, tile: ScoreTile, r: int, factor: Any) -> None:
        """Adds the probabilities of row `r` to its sum, what was summed before times `factor` (None: nothing was)."""
        before = None if factor is None else self.total[r] * factor
        runs = tile.runs
        if runs is None or not runs.back:
            self.total[r] = self.arithmetic.total(before, [tile.values[r, c] for c in range(tile.columns)])
            return
        for n, back in enumerate(runs.back):
            of_run = range(n * runs.columns, (n + 1) * runs.columns)
            total = self.arithmetic.total(None, [tile.values[r, c] for c in of_run])
            before = total * back if before is None else cm.fma(total, back, before)
        self.total[r] = before

    def add_lifted(self, tile: ScoreTile, lifts: Lifts, factors: Sequence[Any]) -> None:
        """`add` of all rows, whose numbers of a column are read once."""
        others = [None] * (lifts.together - 1)
        chains = [[None if f is None else self.total[r] * f, *others] for r, f in enumerate(factors)]
        for first in range(0, tile.columns, lifts.together):
            for i, back in enumerate(lifts.back(first)):
                for r, totals in enumerate(chains):
                    found, before = tile.values[r, first + i], totals[i]
                    totals[i] = found * back if before is None else cm.fma(found, back, before)
        for r, totals in enumerate(chains):
            self.total[r] = tree(add, totals)

    def lower(self, r: int, factor: Any) -> None:
        """What was summed of row `r` before, times `factor`; at once, so that no register keeps the factor for it."""
        self.total[r] = self.total[r] * factor

    def add_to_lowered(self, tile: ScoreTile, r: int, columns: Sequence[int]) -> None:
        """Adds the probabilities of row `r` in these columns to its sum, which `lower` has seen."""
        self.total[r] = self.arithmetic.total(self.total[r], [tile.values[r, c] for c in columns])

    def finish(self, normalizer: cute.Tensor, lse: cute.Tensor, sinks: Sequence[Any], factor: float = 1.0) -> None:
        """`normalizer[r]` gets 1 / sum, `lse[r]` the natural logarithm of the sum of exponentials; see `finished`.

        `sinks`: of each row, a logit in natural units whose exponential is in the sum too, or None. `factor`: of the
        normalizer.
        """
        for r in range(self.shape.rows):
            total = self.shape.along_row(add, self.total[r])
            if self.offset:
                total = total * 2.0**-self.offset
            normalizer[r], lse[r] = self._finished(r, total, sinks[r], self._rounding(r))
            if factor != 1.0 or self.offset:
                normalizer[r] = normalizer[r] * (factor * 2.0**-self.offset)

    def normalize_by(
        self, normalizer: cute.Tensor, totals: Sequence[Any], sinks: Sequence[Any], factor: float = 1.0
    ) -> None:
        """`normalizer` as of `finish` with other sums of the rows, all lanes' together."""
        for r, total in enumerate(totals):
            normalizer[r] = self._finished(r, total * 2.0**-self.offset if self.offset else total, sinks[r])[0]
            if factor != 1.0 or self.offset:
                normalizer[r] = normalizer[r] * (factor * 2.0**-self.offset)

    def _finished(self, r: int, total: Float32, sink: Any, rounding: Any = None) -> tuple[Float32, Float32]:
        """(1 / sum, LSE) of a row with that sum, which the output's has `rounding` more than."""
        maximum = self.maximum[r]
        if self.least > -math.inf:
            maximum = choose(self._is_hidden(maximum), -Float32.inf, maximum)
        if sink is None:
            return finished(maximum, total, self.scale_of(r), rounding)
        return finished_with_sink(maximum, total, self.scale_of(r), sink, rounding)

    def _rounding(self, r: int) -> Any:
        """What the probability of the row's maximum gains where it is rounded, None where nobody rounds it."""
        if self.factors is None:
            return None
        largest = exp2(cm.fma(self.maximum[r], self.scale_of(r), -self.scaled_shift[r]))
        rounding = largest.to(self.factors).to(Float32) - largest
        if self.offset:
            rounding = rounding * 2.0**-self.offset
        return choose(largest < Float32.inf, rounding, Float32(0.0))  # NaN has none either

    @staticmethod
    def _less(value: Any, offset: float) -> Any:
        return value - offset if offset else value

    def _is_hidden(self, maximum: Any) -> Any:
        """Whether a row with this maximum has nothing to attend."""
        return maximum == -Float32.inf if self.least == -math.inf else maximum < self.least

    def highest_scores(self, lse: cute.Tensor) -> list[Float32]:
        """The largest score of each row as lse has them, natural units; NaN, which no maximum shows, where lse is."""
        assert self.highest is not None, "keeps_highest was not asked for"
        found = []
        for r in range(self.shape.rows):
            highest = self.highest[r] * self.scale_of(r) * LN_2
            known = (lse[r] == lse[r]) | (highest == Float32.inf)
            found.append(choose(known, highest, lse[r]))
        return found


def largest_scores(tile: ScoreTile, r: int) -> list[Any]:
    """Scores of row `r` of which the largest is that of all the thread's, for `raise_maximum`."""
    found: list[Any] = []
    for columns, factor, lift in tile.runs_of(r, range(tile.columns)):
        found += _of_run([tile.values[r, c] for c in columns], factor, lift)
    return found


def largest_of_their_own(tile: ScoreTile, r: int) -> list[Any]:
    """`largest_scores` without what was added for V; none where nothing was."""
    if tile.lifts is not None:
        lifts = [x for first in range(0, tile.columns, tile.lifts.together) for x in tile.lifts.lifts(first)]
        return [tile.values[r, c] - lift for c, lift in enumerate(lifts)]
    if tile.runs is None or not tile.runs.back:
        return []
    found: list[Any] = []
    for columns, factor, _ in tile.runs_of(r, range(tile.columns)):
        found += _of_run([tile.values[r, c] for c in columns], factor, None)
    return found


def _of_run(values: list[Any], factor: Any, lift: Any) -> list[Any]:
    """Scores of which the largest is that of a run with these values."""
    if factor is None and lift is None:
        return values
    largest = tree(cute.arch.fmax, chains(cute.arch.fmax, values))
    if factor is None:
        return [largest + lift]
    return [largest * factor if lift is None else cm.fma(largest, factor, lift)]


def finished(maximum: Float32, total: Float32, scale: Float32, rounding: Any = None) -> tuple[Float32, Float32]:
    """(1 / sum, natural logarithm of the sum of exponentials) of a row with these statistics, all its lanes' together.

    `rounding`: what the first of the two sums has more. A row with nothing visible gets normalizer 0 (so O = 0) and
    LSE = -inf; NaN stays NaN.
    """
    nothing = (maximum == -Float32.inf) & (total == 0.0)
    of_output = total if rounding is None else total + rounding
    normalizer = choose(nothing, Float32(0.0), cute.arch.rcp_approx(of_output))
    log2 = maximum * scale + cute.math.log2(total, fastmath=True)
    return normalizer, choose(nothing, -Float32.inf, log2 * LN_2)


def finished_with_sink(
    maximum: Float32, total: Float32, scale: Float32, sink: Float32, rounding: Any = None
) -> tuple[Float32, Float32]:
    """`finished`, where the sum has exp(sink) more, which has no value: where nothing is visible, (0, sink)."""
    before, sink = maximum * scale, sink * LOG2_E
    highest = cute.arch.fmax(before, sink)
    nothing = highest == -Float32.inf
    shift = choose(nothing, Float32(0.0), highest)
    fade = exp2(before - shift)
    whole = total * fade + exp2(sink - shift)
    of_output = whole if rounding is None else whole + rounding * fade
    normalizer = choose(nothing, Float32(0.0), fade * cute.arch.rcp_approx(of_output))
    return normalizer, choose(nothing, -Float32.inf, (shift + cute.math.log2(whole, fastmath=True)) * LN_2)


def rescale_rows(accumulator: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiplies row r of a (row, column) view by `factors[r]`, the first rows where there are fewer of these."""
    columns = range(cute.size(accumulator, mode=[1]))
    for r in range(cute.size(factors)):
        factor = factors[r].ir_value()
        for c in columns:
            # by the language's operations, as one coordinate serves both: a fifth less for an output of 128 numbers
            at = cute.core._pack_coord((r, c))
            product = arith.mulf(language.memref_load(accumulator.value, at), factor)
            language.memref_store(accumulator.value, at, product)


def any_rescales(factors: cute.Tensor) -> Any:
    """Whether one of a warp's factors is not 1."""
    needed = factors[0] != 1.0
    for r in range(1, cute.size(factors)):
        needed = needed | (factors[r] != 1.0)
    return cute.arch.vote_any_sync(needed)


@cute.jit
def rescale_rows_if_needed(accumulator: cute.Tensor, factors: cute.Tensor, then: cutlass.Constexpr = None):
    """`rescale_rows`, and what is done `then`, left out by warps where no row needs it."""
    if any_rescales(factors):
        rescale_rows(accumulator, factors)
        if cutlass.const_expr(then is not None):
            then()
