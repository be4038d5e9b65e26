"""Score mods and masks on a score tile in the backward: P again, and the gradient of the score.

With S the raw q·k, s = scale·S the score, m(s) what the score mod makes of it and D = rowsum(dO·O) - dLSE:

    P  = 2^(log2(e) m(s) - log2(e) LSE)        0 where the mask is false
    dS = P (dP - D) m'(s)                      to be multiplied by scale on its way to dQ and dK

A kernel holds its keys and walks over queries: here column values (kv) live as long as the work tile and row values
(q) as long as one tile, the other way round than in the forward. The part per row that an additive mod leaves out of
the loop there (`BoundMods.row_shift`) is taken from LSE here.

The mask is applied to P, after the exponential: a hidden pair contributes exactly 0, whatever its score was, and a
derivative that is infinite or NaN where P is 0 has no say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute import math as cm

from ..analysis.bands import TileInterval
from ..analysis.captured_gradient import GradientProgram
from ..analysis.program import Program
from ..analysis.row_limits import RowLimits
from ..graph.expr import Capture, Dep, DType, Expr, Rate, const, index, score
from ..graph.gradient import derivative
from ..graph.multiples import constants, is_of_score
from ..graph.philox import factor_of
from .arithmetic import ONE_BY_ONE, Arithmetic
from .branches import when
from .emit import WORD, AdditiveScore, Evaluator, Leaves, Mods, run_ends, run_of
from .emit_captured import AnyDiagonals, CapturedSums
from .emit_dropout import copied, drop
from .emit_metadata import AgreedReads
from .emit_ops import convert, tanh_of
from .emit_row import MODERATE, near_tanh
from .emit_strips import QueryWords, columns_of_row
from .exponential import LOG2_E, exp2
from .score_tile import ScoreTile
from .values import Fixed, choose, larger, smaller, total


class BackwardMods:
    """The mods of a plan and their derivative; holds graphs, no run-time values.

    `arithmetic`: how a thread computes neighbours, where no score mod stands between. `columns`: of queries of a strip,
    where the mask is of strips of an image.
    """

    def __init__(
        self,
        program: Program,
        intervals: tuple[TileInterval, ...] = (),
        limits: RowLimits | None = None,
        captured: tuple[Capture, ...] | None = None,
        arithmetic: Arithmetic = ONE_BY_ONE,
        columns: int = 0,
    ) -> None:
        self.near = False  # whether scores whose tanh are of small numbers go another way
        self.mods, self.arithmetic = Mods(program, captured=captured), arithmetic
        self.mods.bounds, self.mods.limits = intervals, limits
        self.columns = columns
        self.score, self.mask = program.score, program.mask
        slope = const(1.0) if program.score is None else derivative(program.score)
        self.slope: Expr | None = None if slope is const(1.0) else slope
        self.sums = CapturedSums(program, self.mods.capture_slot) if isinstance(program, GradientProgram) else None

    @property
    def one_pass(self) -> bool:
        """Whether the derivative looks at the score: then P and dS are computed together, from S and dP."""
        return self.slope is not None and bool(self.slope.deps & Dep.SCORE)

    @property
    def bends(self) -> bool:
        """Whether the score mod is of the score alone, each tanh of a constant times it, and computed one by one.

        What else a mod reads would be in registers twice: a table by distance spilled 18, a bias by pair 72 for 64.
        """
        if not is_of_score(self.score) or self.mods.steepest is None or self.arithmetic is not ONE_BY_ONE:
            return False
        return max(self.mods.steepest, abs(constants(self.score)[1])) < MODERATE  # larger ones times scale may be inf

    def intervals(self, leaves: Leaves) -> list[tuple[Any, Any, Any, Any]]:
        """(begin, end, full_begin, full_end) of each run of queries that the kv tile visits, int32."""
        return self.mods.intervals(leaves) if leaves.metadata is None else [leaves.metadata.queries]

    def at(self, tile: ScoreTile, leaves: Leaves) -> BoundBackwardMods:
        """The mods at a work tile, with all that does not change along q computed."""
        return BoundBackwardMods(self, tile, leaves)


class BoundBackwardMods(Fixed):
    """Mods at one tile of keys of one head; applied to the score tiles along q."""

    def __init__(self, backward: BackwardMods, tile: ScoreTile, leaves: Leaves) -> None:
        self.backward, self.mods, self.leaves = backward, backward.mods, leaves
        self.work = Evaluator(self.mods, leaves, tile)
        roots = [backward.mask, backward.slope, backward.score]
        self.work.prepare(*roots, along=Rate.COLUMN)
        self.words: QueryWords | None = None
        if backward.columns and columns_of_row(tile.shape.row_offsets, backward.columns):
            self.words = QueryWords(self, tile, backward.columns)

    def evaluator(self, tile: ScoreTile) -> Evaluator:
        at = Evaluator(self.mods, self.leaves, tile)
        at.head, at.column = dict(self.work.head), dict(self.work.column)
        return at

    def read_ahead(self, at: Evaluator) -> None:
        """Starts reads of the score mod that need not wait for the scores."""
        at.read_ahead(self.backward.score)

    def probabilities(self, at: Evaluator, lse: Any, tested: Boolean) -> None:
        """Raw q·k to P, in place; `lse[r]` in log2 units, inf for a row with nothing to attend."""
        if self.backward.score is None:
            self._plain_probabilities(at.tile, lse)
        else:
            exponent = self._exponent(at, lse)
            for r, c in _places(at.tile):
                at.tile.values[r, c] = exp2(exponent(r, c))
                at.forget_element()
        self._hide(at, tested, at.tile.values)

    def _plain_probabilities(self, tile: ScoreTile, lse: Any) -> None:
        arithmetic, factor = self.backward.arithmetic, self.leaves.scale * LOG2_E
        for places in _together(tile, arithmetic):
            scores = [tile.values[place] for place in places]
            exponents = arithmetic.times_plus(scores, factor, [-lse[r] for r, _ in places])
            for place, exponent in zip(places, exponents, strict=True):
                tile.values[place] = exp2(exponent)

    def score_gradients(self, at: Evaluator, d_probabilities: cute.Tensor, delta: Any) -> None:
        """dP to dS, in place, with P in the tile; `delta[r]` is D. Only where the derivative does not see the score."""
        if self.backward.slope is None:
            self._plain_gradients(at.tile, d_probabilities, delta)
            return
        for r, c in _places(at.tile):
            d_probabilities[r, c] = self._gradient(at, r, c, at.tile.values[r, c], d_probabilities[r, c] - delta[r])
            at.forget_element()

    def _plain_gradients(self, tile: ScoreTile, d_probabilities: cute.Tensor, delta: Any) -> None:
        arithmetic = self.backward.arithmetic
        for places in _together(tile, arithmetic):
            values = [tile.values[place] for place in places]
            gradients = [d_probabilities[place] for place in places]
            differences = arithmetic.differences(gradients, [delta[r] for r, _ in places])
            for place, found in zip(places, arithmetic.products(values, differences), strict=True):
                d_probabilities[place] = found

    def both(self, at: Evaluator, lse: Any, d_probabilities: cute.Tensor, delta: Any, tested: Boolean) -> None:
        """Raw q·k to P and dP to dS, in place; what the score and its derivative share is computed once."""
        if self.backward.bends and not self.backward.near:
            self.bend(at, lse, d_probabilities, delta, near=False)
        elif self.backward.bends:
            scores = [at.tile.values[place] for place in _places(at.tile)]
            far = cute.arch.vote_any_sync(~self.mods.is_near(self.leaves.scale, scores))
            _bend_by_either(far, self, at, lse, d_probabilities, delta)
        else:
            self._both(at, lse, d_probabilities, delta)
        self._hide(at, tested, at.tile.values, d_probabilities)

    def _both(self, at: Evaluator, lse: Any, d_probabilities: cute.Tensor, delta: Any) -> None:
        exponent = self._exponent(at, lse)
        for r, c in _places(at.tile):
            p = exp2(exponent(r, c))
            d_probabilities[r, c] = self._gradient(at, r, c, p, d_probabilities[r, c] - delta[r])
            at.tile.values[r, c] = p
            at.forget_element()

    def weights(self, at: Evaluator, lse: Any, weights: cute.Tensor, tested: Boolean) -> None:
        """Raw q·k to P, in place, and what dP - D is multiplied by for dS: `both` before there is a dP."""
        weights.fill(1.0)
        self.both(at, lse, weights, [Float32(0.0)] * at.tile.rows, tested)

    def bend(self, outer: Evaluator, lse: Any, d_probabilities: cute.Tensor, delta: Any, near: bool) -> None:
        """`both` without the mask, for a score mod whose `steepest` tanh is known."""
        tile = outer.tile
        at = BentScores(self.mods, self.leaves, tile, near)
        at.head, at.column, at.ahead = dict(self.work.head), dict(self.work.column), outer.ahead
        assert self.backward.score is not None, "no score mod bends"
        rest, factor = constants(self.backward.score)
        for r, c in _places(tile):
            p = exp2(cm.fma(Float32(at.value(rest, r, c)), Float32(factor * LOG2_E), -lse[r]))
            d_probabilities[r, c] = self._gradient(at, r, c, p, d_probabilities[r, c] - delta[r])
            tile.values[r, c] = p
            at.forget_element()

    def weighted(self, d_probabilities: cute.Tensor, weights: cute.Tensor, delta: Any) -> None:
        """dP to dS, in place."""
        for r in range(cute.size(weights, mode=[0])):
            for c in range(cute.size(weights, mode=[1])):
                d_probabilities[r, c] = weights[r, c] * (d_probabilities[r, c] - delta[r])

    def drop(self, at: Evaluator, values: Any) -> None:
        """P that was, or dP that is, to be multiplied by what dropout keeps: so it is, in place."""
        if self.mods.keep is not None:
            drop(at, self.mods.keep, values, factor_of(self.mods.keep))

    def dropped(self, at: Evaluator, values: cute.Tensor, view: Callable[[cute.Tensor], Any]) -> cute.Tensor:
        """Registers, which `view` shows as rows and columns, of what `drop` leaves; the given ones stay as they are."""
        if self.mods.keep is None:
            return values
        copy = copied(values)
        self.drop(at, view(copy))
        return copy

    def sum_captured(self, at: Evaluator, ds: cute.Tensor, diagonals: AnyDiagonals | None) -> Callable[[], None]:
        """What the tile's dS give to captured tensors, if the plan sums any; all of it after a call of the result."""
        sums = self.backward.sums
        return (lambda: None) if sums is None else sums.add(at, ds, diagonals)

    def _gradient(self, at: Evaluator, r: int, c: int, p: Any, difference: Any) -> Any:
        slope = self.backward.slope
        if slope is None:
            return p * difference
        ds = p * difference * convert(at.value(slope, r, c), DType.FLOAT)
        may_be_infinite = slope.rate is Rate.ELEMENT and not (self.backward.bends and _is_of_tanh(slope))
        return choose(p == 0.0, Float32(0.0), ds) if may_be_infinite else ds

    def _exponent(self, at: Evaluator, lse: Any) -> Callable[[int, int], Any]:
        """(r, c) → log2(P), before the mask."""
        values, score = at.tile.values, self.backward.score
        if score is None:
            factor = self.leaves.scale * LOG2_E
            return lambda r, c: cm.fma(values[r, c], factor, -lse[r])
        if self.mods.additive is not None:
            return self._additive_exponent(at, self.mods.additive, lse)
        return lambda r, c: cm.fma(Float32(at.value(score, r, c)), Float32(LOG2_E), -lse[r])

    def _additive_exponent(self, at: Evaluator, shape: AdditiveScore, lse: Any) -> Callable[[int, int], Any]:
        tile = at.tile
        factor = self.leaves.scale * LOG2_E
        if shape.factor is not None:
            factor = convert(at.value(shape.factor), DType.FLOAT) * factor
        along = [total(term.column(at, c) for term in shape.linear_terms) for c in range(tile.columns)]
        along = [None if a is None else a * LOG2_E for a in along]
        bases: dict[int, Any] = {}

        def base(r: int) -> Any:
            if r not in bases:
                shift = total(term.row(at, r) for term in shape.linear_terms if term.form.q)
                bases[r] = lse[r] if shift is None else lse[r] - shift * LOG2_E
            return bases[r]

        def exponent(r: int, c: int) -> Any:
            added = -base(r) if along[c] is None else along[c] - base(r)
            for sign, term in shape.others:
                added = added + convert(at.value(term, r, c), DType.FLOAT) * (sign * LOG2_E)
            return cm.fma(tile.values[r, c], factor, Float32(added))

        return exponent

    def _hide(self, at: Evaluator, tested: Boolean, *targets: cute.Tensor) -> None:
        """0 where the mask is false or the position lies outside the sequences."""
        when(tested, lambda: self.hide(self.evaluator(at.tile), targets))

    def hide(self, at: Evaluator, targets: tuple[cute.Tensor, ...]) -> None:
        """By the columns' limits where they hold, else by the mask, which a branch decides."""
        if self.words is not None:
            self.hide_by_words(at.tile, self.words, targets)
        elif self.leaves.metadata is None:
            self.hide_one_by_one(at, targets)
        else:
            agreed = self.leaves.metadata.agreed()  # read here: 80 queries in bulk spilled 11 for 5, and lost 1 %
            _hide_agreed(agreed.all_keys, agreed, self, at, targets)

    def hide_agreed(self, agreed: AgreedReads, at: Evaluator, targets: tuple[cute.Tensor, ...]) -> None:
        """By limits where all columns read what the first one does, as far as the tile's last key."""
        for read, value in agreed.said.items():
            at.column.update({(read, c): value for c in range(at.tile.columns)})
        self.hide_by_limits(at, targets, self.leaves.last + 1)

    def hide_one_by_one(self, at: Evaluator, targets: tuple[cute.Tensor, ...]) -> None:
        """By what each column reads."""
        limits = self.mods.limits
        holds = False if limits is None else at.value(limits.holds)
        if isinstance(holds, bool):
            (self.hide_by_limits if holds else self.hide_by_mask)(at, targets)
        else:
            _hide_by_either(holds, self, at, targets)

    def hide_by_words(self, tile: ScoreTile, words: QueryWords, targets: tuple[cute.Tensor, ...]) -> None:
        found = words.of(tile)
        of_column = len(found) // tile.columns
        for r, c in _places(tile):
            shown = found[c * of_column + r // WORD] & (1 << r % WORD) != 0
            for target in targets:
                target[r, c] = choose(shown, target[r, c], Float32(0.0))

    def hide_by_limits(self, at: Evaluator, targets: tuple[cute.Tensor, ...], stop: Any = None) -> None:
        """By the first and last query that sees a column, read here: registers are scarce outside of the branch.

        Columns from `stop` on, by default behind the last key, see nothing.
        """
        tile, leaves, limits = at.tile, self.leaves, self.mods.limits
        assert limits is not None, "the mask is no run of queries"

        def before(end: Any) -> Any:
            return tile.shape.rows_before(larger(end - tile.first_q, 0))

        # rows beyond the last query: see `hide_by_mask`
        to_the_end = self.backward.score is None and limits.end is index("q_len")
        stop = leaves.kv_len if stop is None else stop
        for c in range(tile.columns):
            begin, end = run_ends(at, limits, 0, c)
            begin = choose(tile.kv_index(c) < stop, Int32(0) if begin is None else begin, leaves.q_len)
            behind = None if to_the_end else before(smaller(end, leaves.q_len))
            for r, visible in run_of(tile.rows, before(begin), behind):
                for target in targets:
                    target[r, c] = choose(visible, target[r, c], Float32(0.0))
            at.forget_element()

    def hide_by_mask(self, at: Evaluator, targets: tuple[cute.Tensor, ...]) -> None:
        """Element by element."""
        tile, mask = at.tile, self.backward.mask
        at.read_ahead(mask)
        kv_limit = self.leaves.kv_len - tile.first_kv
        inside_kv = [tile.shape.column_offsets[c] < kv_limit for c in range(tile.columns)]
        # rows beyond the last query have P = 0 and dS = 0, but what a score mod may make of them
        q_limit = None if self.backward.score is None else self.leaves.q_len - tile.first_q
        for r in range(tile.rows):
            inside_q = True if q_limit is None else tile.shape.row_offsets[r] < q_limit
            for c in range(tile.columns):
                visible = inside_kv[c] if inside_q is True else inside_kv[c] & inside_q
                if mask is not None:
                    value = at.value(mask, r, c)
                    visible = visible & value if not isinstance(value, bool) or not value else visible
                for target in targets:
                    target[r, c] = choose(visible, target[r, c], Float32(0.0))
                at.forget_element()


@cute.jit
def _bend_by_either(
    far: Boolean,
    mods: cutlass.Constexpr,
    at: cutlass.Constexpr,
    lse: cutlass.Constexpr,
    d_probabilities: cutlass.Constexpr,
    delta: cutlass.Constexpr,
):
    if far:
        mods.bend(at, _afresh(lse), d_probabilities, _afresh(delta), near=False)
    else:
        mods.bend(at, _afresh(lse), d_probabilities, _afresh(delta), near=True)


@cute.jit
def _hide_agreed(
    agree: Boolean,
    agreed: cutlass.Constexpr,
    mods: cutlass.Constexpr,
    at: cutlass.Constexpr,
    targets: cutlass.Constexpr,
):
    if agree:
        mods.hide_agreed(agreed, mods.evaluator(at.tile), targets)
    else:
        mods.hide_one_by_one(mods.evaluator(at.tile), targets)


@cute.jit
def _hide_by_either(holds: Boolean, mods: cutlass.Constexpr, at: cutlass.Constexpr, targets: cutlass.Constexpr):
    if holds:
        mods.hide_by_limits(mods.evaluator(at.tile), targets)
    else:
        mods.hide_by_mask(mods.evaluator(at.tile), targets)


def _afresh(statistic: Any) -> Any:
    """A statistic of rows that is read when first asked for: in a branch, for the branch."""
    return statistic.afresh() if hasattr(statistic, "afresh") else statistic


class BentScores(Evaluator):
    """Values of a score mod whose tanh are of constants times the score: those are one. `near`: see `Mods.is_near`."""

    def __init__(self, mods: Mods, leaves: Leaves, tile: ScoreTile, near: bool) -> None:
        super().__init__(mods, leaves, tile)
        self.near = near

    def _compute(self, node: Expr, r: int, c: int) -> Any:
        x, factor = constants(node.args[0]) if node.op == "tanh" else (None, 1.0)
        if x is not score():
            return super()._compute(node, r, c)
        raw, scale = self.tile.values[r, c], self.leaves.scale
        if self.near:
            return near_tanh([raw * (scale * factor)], ONE_BY_ONE)[0]
        return tanh_of(raw * (scale * (factor * 2.0 * LOG2_E)))


def _is_of_tanh(node: Expr) -> bool:
    """Whether it is a number wherever its tanh are, as the derivative of a soft cap is."""
    return node.is_const or node.op == "tanh" or (node.op in ("add", "sub", "mul") and all(map(_is_of_tanh, node.args)))


def _together(tile: ScoreTile, arithmetic: Arithmetic) -> list[list[tuple[int, int]]]:
    """Places that are computed together."""
    places, count = _places(tile), arithmetic.together
    return [places[n : n + count] for n in range(0, len(places), count)]


def _places(tile: ScoreTile) -> list[tuple[int, int]]:
    return [(r, c) for r in range(tile.rows) for c in range(tile.columns)]
