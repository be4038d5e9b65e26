"""Scales of quantised q, k and v folded into the softmax: what changes with rows or runs of keys costs no instruction.

A probability is 2^(score * scale - shift), one multiply-add for each score. Scales of a head, a row or a run of keys
make its `scale`. That of V of a run makes its shift: P by a scale is a score plus the scale's logarithm, so that the
largest P of a row, scaled, is 1, whatever scales are, as a P of 8 bits needs it. The row's sum takes each run's scale
back. Scales of each key multiply the scores, one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute import math as cm

from ..graph.expr import DType, Expr, Rate
from ..graph.factors import RUNS, Scales
from .emit_ops import convert
from .exponential import LN_2, exp2, log2
from .score_tile import Runs, ScoreTile
from .values import Fixed, choose

LEAST_SCALE = 2.0**-100  # above 0, as -inf times 0 is NaN
RUNS_AT_MOST = max(RUNS) // min(RUNS)  # in a tile


class RunScales(Fixed):
    """What a tile's runs of keys are multiplied by, in shared memory: written once, by a warp that copies, for all.

    `start`: three rows of `RUNS_AT_MOST` numbers for each of `stages`. Factors of scores, what is added for V, and what
    takes that back from sums. Each thread that found them itself took a quarter of a tile's instructions for it.
    """

    def __init__(self, scales: Scales, bends: bool, start: cute.Pointer, stages: int, count: int) -> None:
        self.scales, self.bends, self.count = scales, bends, count
        layout = cute.make_layout((RUNS_AT_MOST, 3, stages), stride=(1, RUNS_AT_MOST, 3 * RUNS_AT_MOST))
        self.kept = cute.make_tensor(start, layout)

    def found(self, at: Any) -> list[Any]:
        """The three numbers of the run in which the tile of `at` begins; None: as if there was none."""
        factor = _product(_number(at, node) for node in self.scales.runs)
        if factor is not None:
            factor = choose(factor >= 0.0, factor, Float32(math.nan))
        if self.scales.values is None:
            return [factor, None, None]
        logarithm = log2(_number(at, self.scales.values) + LEAST_SCALE)
        return [factor, logarithm * LN_2 if self.bends else logarithm, exp2(-logarithm)]

    def put(self, found: list[Any], run: Any, stage: Any) -> None:
        """By each of the first lanes; those behind the last run too, as four numbers are read at once."""
        _put_if(self.kept, found, run, stage, run < RUNS_AT_MOST)

    def get(self, stage: Any) -> list[list[Any]]:
        """Factors, lifts and what takes these back, of each run; none where all are 1."""
        there = bool(self.scales.runs), self.scales.values is not None, self.scales.values is not None
        return [[self.kept[n, i, stage] for n in range(self.count)] if has else [] for i, has in enumerate(there)]


@cute.jit
def _put_if(kept, found: cutlass.Constexpr, run: Int32, stage: Int32, condition: Boolean):
    if condition:
        for i, number in enumerate(found):
            if cutlass.const_expr(number is not None):
                kept[run, i, stage] = number


@dataclasses.dataclass
class ReadScales(Fixed):
    """Scales of a tile of keys: by each of the thread's columns, and by run, see `RunScales.get`."""

    columns: list[Any]
    factors: list[Any] = dataclasses.field(default_factory=list)
    lifts: list[Any] = dataclasses.field(default_factory=list)
    back: list[Any] = dataclasses.field(default_factory=list)


class BoundScales(Fixed):
    """The scales at a work tile; `at` has what its rows know. `bends`: a score mod needs true scores."""

    def __init__(self, scales: Scales, at: Any, bends: bool) -> None:
        self.scales, self.bends = scales, bends
        assert scales.values is None or scales.keys, "values of each key have no kernel of 8 bits"
        self.of_head = _product(_number(at, factor) for factor in scales.heads)
        rows = range(at.tile.rows)
        self.of_rows = [_product(_number(at, factor, r) for factor in scales.rows) for r in rows]
        self.softmax_scales = [None for _ in rows]

    @property
    def by_rows(self) -> bool:
        """Whether the softmax multiplies by numbers of rows or runs."""
        return bool(self.scales.rows or self.scales.keys) and not self.bends

    def of_leaves(self, scale: Any) -> Any:
        """The user's scale with that of the head, where a score mod follows."""
        return scale * self.of_head if self.bends and self.of_head is not None else scale

    def of_softmax(self, scale: Any) -> Any:
        """What the softmax multiplies all scores by: `scale` with that of the head; 1 where it goes by rows."""
        if self.bends:
            return scale
        if self.of_head is not None:
            scale = scale * self.of_head
        if self.by_rows:
            self.softmax_scales = [_checked(scale if row is None else scale * row) for row in self.of_rows]
            return Float32(1.0)
        return scale if self.of_head is None else _checked(scale)

    def read_ahead(self, at: Any) -> ReadScales:
        """The scales of the tile of `at`, which wait for no score."""
        columns = range(at.tile.columns)
        for factor in self.scales.columns:
            at.read_ahead(factor, (Rate.COLUMN,))
        return ReadScales([_product(_number(at, factor, 0, c) for factor in self.scales.columns) for c in columns])

    def apply(self, tile: ScoreTile, read: ReadScales) -> None:
        """Scores by scales that the softmax does not multiply by, in place; gives the tile those that it does."""
        wide = _columns(tile, self.scales.keys)
        for r in range(tile.rows):
            for c in range(tile.columns):
                factors = [read.columns[c]]
                if self.bends:
                    factors += [self.of_rows[r], read.factors[c // wide] if read.factors else None]
                factor = _product(factors)
                if factor is not None:
                    tile.values[r, c] = tile.values[r, c] * factor
        if self.by_rows or read.lifts:
            tile.runs = Runs(wide, self._factors(read, tile.columns // wide), read.lifts, read.back)

    def _factors(self, read: ReadScales, count: int) -> Sequence[Sequence[Any]]:
        """Factors of each run, by row."""
        if self.bends:
            return ()
        if read.factors:
            least = Float32(LEAST_SCALE)
            return [[cm.fma(of_row, scale, least) for of_row in self.softmax_scales] for scale in read.factors]
        return [self.softmax_scales] * count


def _columns(tile: ScoreTile, keys: int) -> int:
    """How many of the thread's columns a run of so many keys has; 0: all."""
    return sum(offset < keys for offset in tile.shape.column_offsets) if keys else tile.columns


def _number(at: Any, node: Expr, r: int = 0, c: int = 0) -> Any:
    return Float32(convert(at.value(node, r, c), DType.FLOAT))


def _product(factors: Iterable[Any]) -> Any:
    """The product of those that are there; None: there is none."""
    found: Any = None
    for factor in factors:
        if factor is not None:
            found = factor if found is None else found * factor
    return found


def _checked(scale: Any) -> Any:
    """NaN where it is negative."""
    return choose(scale >= 0.0, cm.max(scale, Float32(LEAST_SCALE)), Float32(math.nan))


__all__ = ["BoundScales", "ReadScales", "RunScales"]
