"""Score mods and masks on a score tile in the backward: P again, and the gradient of the score.

With S the raw q·k, s = scale·S the score, m(s) what the score mod makes of it and D = rowsum(dO·O) - dLSE:

    P  = 2^(log2(e) m(s) - log2(e) LSE)        0 where the mask is false
    dS = P (dP - D) m'(s)                      to be multiplied by scale on its way to dQ and dK

A kernel holds its keys and walks over queries: here column values (kv) live as long as the work tile and row values
(q) as long as one tile, the other way round than in the forward. The part a row that an additive mod leaves out of the
loop there (`BoundMods.row_shift`) is taken from LSE here.

The mask is applied to P, after the exponential: a hidden pair contributes exactly 0, whatever its score was, and a
derivative that is infinite or NaN where P is 0 has no say.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.cute import math as cm

from ..graph.bands import TileInterval
from ..graph.expr import Capture, Dep, DType, Expr, Rate, const
from ..graph.gradient import derivative
from ..graph.program import Program
from .emit import LOG2_E, AdditiveScore, Evaluator, Leaves, Mods, linear
from .emit_ops import convert
from .score_tile import ScoreTile
from .values import Fixed, choose


class BackwardMods:
    """The mods of a plan and their derivative; holds graphs, no run-time values."""

    def __init__(
        self, program: Program, intervals: tuple[TileInterval, ...] = (), captured: tuple[Capture, ...] = ()
    ) -> None:
        self.mods = Mods(program)
        self.mods.bounds = intervals
        if captured:
            self.mods.capture_slot = {capture: slot for slot, capture in enumerate(captured)}
        self.score, self.mask = program.score, program.mask
        slope = const(1.0) if program.score is None else derivative(program.score)
        self.slope: Expr | None = None if slope is const(1.0) else slope

    @property
    def one_pass(self) -> bool:
        """Whether the derivative looks at the score: then P and dS are computed together, from S and dP."""
        return self.slope is not None and bool(self.slope.deps & Dep.SCORE)

    def intervals(self, leaves: Leaves) -> list[tuple[Any, Any, Any, Any]]:
        """(begin, end, full_begin, full_end) of each run of queries that the kv tile visits, int32."""
        return self.mods.intervals(leaves)

    def at(self, tile: ScoreTile, leaves: Leaves) -> BoundBackwardMods:
        """The mods at a work tile, with all that does not change along q computed."""
        return BoundBackwardMods(self, tile, leaves)


class BoundBackwardMods(Fixed):
    """Mods at one tile of keys of one head; applied to the score tiles along q."""

    def __init__(self, backward: BackwardMods, tile: ScoreTile, leaves: Leaves) -> None:
        self.backward, self.mods, self.leaves = backward, backward.mods, leaves
        self.work = Evaluator(self.mods, leaves, tile)
        roots = [backward.mask, backward.slope, backward.score]
        _prepare_columns(self.work, [root for root in roots if root is not None])

    def evaluator(self, tile: ScoreTile) -> Evaluator:
        at = Evaluator(self.mods, self.leaves, tile)
        at.head, at.column = dict(self.work.head), dict(self.work.column)
        return at

    # --- P, where the derivative does not look at the score ----------------------------------------------------

    def probabilities(self, at: Evaluator, lse: cute.Tensor, tested: Boolean) -> None:
        """Raw q·k to P, in place; `lse[r]` in log2 units, inf for a row with nothing to attend."""
        if self.backward.score is None:
            factor = self.leaves.scale * LOG2_E
            _each(at.tile, lambda r, c, raw: _exp2(cm.fma(raw, factor, -lse[r])))
        elif self.mods.additive is not None:
            self._additive(at, self.mods.additive, lse)
        else:
            score = self.backward.score
            _each(at.tile, lambda r, c, raw: _exp2(self._log2(at, score, r, c, lse)))
        self._hide(at, tested, at.tile.values)

    def _additive(self, at: Evaluator, shape: AdditiveScore, lse: cute.Tensor) -> None:
        factor = self.leaves.scale * LOG2_E
        if shape.factor is not None:
            factor = convert(at.value(shape.factor), DType.FLOAT) * factor
        tile = at.tile
        along = []
        for c in range(tile.columns):
            parts = [term.column(at, c) for term in shape.linear_terms]
            along.append(_sum(parts) * LOG2_E if parts else None)
        for r in range(tile.rows):
            shifts = [term.row(at, r) for term in shape.linear_terms if term.form.q]
            base = lse[r] - _sum(shifts) * LOG2_E if shifts else lse[r]
            for c in range(tile.columns):
                added = -base if along[c] is None else along[c] - base
                for sign, term in shape.others:
                    added = added + convert(at.value(term, r, c), DType.FLOAT) * (sign * LOG2_E)
                tile.values[r, c] = _exp2(cm.fma(tile.values[r, c], factor, Float32(added)))
                at.forget_element()

    def _log2(self, at: Evaluator, score: Expr, r: int, c: int, lse: cute.Tensor) -> Any:
        return cm.fma(Float32(at.value(score, r, c)), Float32(LOG2_E), -lse[r])

    def score_gradients(self, at: Evaluator, d_probabilities: cute.Tensor, delta: cute.Tensor) -> None:
        """dP to dS, in place, with P in the tile; `delta[r]` is D."""
        slope = self.backward.slope

        def gradient(r: int, c: int, p: Any) -> None:
            ds = p * (d_probabilities[r, c] - delta[r])
            if slope is not None:
                factor = convert(at.value(slope, r, c), DType.FLOAT)
                ds = choose(p == 0.0, Float32(0.0), ds * factor) if slope.rate is Rate.ELEMENT else ds * factor
            d_probabilities[r, c] = ds

        for r in range(at.tile.rows):
            for c in range(at.tile.columns):
                gradient(r, c, at.tile.values[r, c])
                at.forget_element()

    # --- P and dS together ------------------------------------------------------------------------------------

    def both(
        self, at: Evaluator, lse: cute.Tensor, d_probabilities: cute.Tensor, delta: cute.Tensor, tested: Boolean
    ) -> None:
        """Raw q·k to P and dP to dS, in place; what the score and its derivative share is computed once."""
        score, slope = self.backward.score, self.backward.slope
        tile = at.tile
        for r in range(tile.rows):
            for c in range(tile.columns):
                p = _exp2(self._log2(at, score, r, c, lse))
                factor = convert(at.value(slope, r, c), DType.FLOAT)
                ds = p * (d_probabilities[r, c] - delta[r]) * factor
                tile.values[r, c] = p
                d_probabilities[r, c] = choose(p == 0.0, Float32(0.0), ds)
                at.forget_element()
        self._hide(at, tested, tile.values, d_probabilities)

    def _hide(self, at: Evaluator, tested: Boolean, *targets: cute.Tensor) -> None:
        """0 where the mask is false or the position lies outside the sequences."""
        _hide_if(tested, self, at, targets)

    def hide(self, at: Evaluator, targets: tuple[cute.Tensor, ...]) -> None:
        tile, mask = at.tile, self.backward.mask
        kv_limit = self.leaves.kv_len - tile.first_kv
        inside_kv = [tile.shape.column_offsets[c] < kv_limit for c in range(tile.columns)]
        q_limit = self.leaves.q_len - tile.first_q
        for r in range(tile.rows):
            inside_q = tile.shape.row_offsets[r] < q_limit
            for c in range(tile.columns):
                visible = inside_kv[c] & inside_q
                if mask is not None:
                    value = at.value(mask, r, c)
                    visible = visible & value if not isinstance(value, bool) or not value else visible
                for target in targets:
                    target[r, c] = choose(visible, target[r, c], Float32(0.0))
                at.forget_element()


@cute.jit
def _hide_if(tested: Boolean, mods: cutlass.Constexpr, at: cutlass.Constexpr, targets: cutlass.Constexpr):
    if tested:
        # what is computed in the branch must not be seen outside of it
        mods.hide(mods.evaluator(at.tile), targets)


def _each(tile: ScoreTile, function: Any) -> None:
    for r in range(tile.rows):
        for c in range(tile.columns):
            tile.values[r, c] = function(r, c, tile.values[r, c])


def _exp2(x: Any) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def _sum(parts: list[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _prepare_columns(at: Evaluator, roots: list[Expr]) -> None:
    """Computes, now, everything under `roots` that does not change along q."""
    seen: set[Expr] = set()

    def visit(node: Expr) -> None:
        if node in seen or node.is_const:
            return
        seen.add(node)
        if node.rate in (Rate.CONSTANT, Rate.HEAD):
            at.value(node)
        elif node.rate is Rate.COLUMN and linear(node) is None:
            for c in range(at.tile.columns):
                at.value(node, 0, c)
        else:
            for a in node.args:
                visit(a)

    for root in roots:
        visit(root)


__all__ = ["BackwardMods", "BoundBackwardMods"]
