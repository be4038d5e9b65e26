"""The minimum or maximum of a captured tensor over a range of one of its indices, as two reads of a derived table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from ..graph.expr import Capture, Expr, const, read, size
from ..graph.linear import larger, smaller
from ..graph.ops import apply
from .derived import Derived, countable, derive, plain_tensors
from .matches import Matches

LEVELS = 9  # windows of 1, 2, 4, ... 256 rows: exact for ranges up to 512 rows; the last level is the whole


def range_extreme(capture: Capture, dim: int, others: tuple[Expr, ...], low: Expr, high: Expr, largest: bool) -> Expr:
    """The smallest (largest) of `capture` over positions low..high of `dim`, the other indices given.

    `low` must be provably at least 0; positions beyond the end read the last element, as reads do.
    Two overlapping windows of 2^k rows cover a range exactly (Bender and Farach-Colton 2000, section 3).
    """
    if low is high:
        return read(capture, (*others[:dim], low, *others[dim:]))
    given = (*others[:dim], low, *others[dim:])
    # of a dimension read at a constant only that part is needed
    fixed = tuple(i.attr if i.is_const and d != dim else None for d, i in enumerate(given))
    recipe = _WindowsOf(dim, largest, fixed)
    if isinstance(capture, Matches) and fixed[0] is not None and largest is (fixed[0] >= capture.half):
        fixed = (None, *fixed[1:])  # but all of the ends, which a tile asks for: one table for them
        recipe = _WindowsOf(dim, False, fixed, turned=capture.half)
    table = derive(recipe, recipe, capture, kind=Windows)
    last = apply("sub", size(table, 1 + dim - sum(i is not None for i in fixed[:dim])), const(1))
    low, high = smaller(low, last), smaller(high, last)
    count = apply("add", apply("sub", high, low), const(1))
    level: Expr = const(0)
    for k in range(1, LEVELS):
        level = apply("add", level, apply("cast_int32", apply("ge", count, const(1 << k))))
    level = apply("add", level, apply("cast_int32", apply("gt", count, const(1 << LEVELS))))
    start = apply("sub", apply("add", high, const(1)), apply("lshift", const(1), level))
    ends = (low, larger(start, const(0)))
    values = [
        read(table, (level, *(i for i, f in zip((*others[:dim], at, *others[dim:]), fixed, strict=True) if f is None)))
        for at in ends
    ]
    return apply("maximum" if largest else "minimum", *values)


@dataclass(frozen=True)
class _WindowsOf:
    """The recipe of a table of windows over `dim`, of what is left of a tensor at the positions that are `fixed`.

    `turned`: from which part of the first dimension on the other extreme is kept; None, of no part.
    """

    dim: int
    largest: bool
    fixed: tuple[int | None, ...]
    turned: int | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Table(self, x).of(x)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """`x` at the positions that are fixed."""
        for d in reversed(range(len(self.fixed))):
            at = self.fixed[d]
            x = x if at is None else x.select(d, at)
        return x


class Windows(Derived):
    """A table of windows, computed by one operation per level, aside: others may read what it was meanwhile."""

    __slots__ = ("_table",)

    @property
    def range(self) -> tuple[int, int]:
        return self.sources[0].range

    def _compute(self) -> torch.Tensor:
        with plain_tensors():
            x = self.sources[0].tensor
            if not hasattr(self, "_table"):
                self._table = _Table(self.recipe, x)  # type: ignore[arg-type]
                return self._table.of(x).clone()
            return self._table.of(x)


class _Table:
    """The extreme of each window of 2^k positions, k along a new first dimension, and last that of the whole.

    It stands, too, where a window would reach beyond the end: nobody asks for those. The views that operations read and
    write are kept: a dozen operations remain where making the views anew takes three times as many.
    """

    def __init__(self, recipe: _WindowsOf, x: torch.Tensor) -> None:
        self.recipe = recipe
        x, dim = countable(recipe.part(x)), recipe.dim - sum(i is not None for i in recipe.fixed[: recipe.dim])
        self.tensor = x.new_empty((LEVELS + 1, *x.shape))
        levels = self.tensor.unbind()
        self.rows, self.wider, self.dim = levels[0], self.tensor[1:], dim
        self.pairs = []  # neighbouring windows, and those of twice their width
        for k, (last, level) in enumerate(pairwise(levels[:LEVELS])):
            kept = x.shape[dim] - (1 << k)
            if kept <= 0:
                break
            self.pairs.append((last.narrow(dim, 0, kept), last.narrow(dim, 1 << k, kept), level.narrow(dim, 0, kept)))
        self.pick, self.over = (torch.maximum, torch.amax) if recipe.largest else (torch.minimum, torch.amin)
        # inverted bits turn the order around, with no number that has no opposite
        self.turned = None if recipe.turned is None else self.tensor[:, recipe.turned :]
        self.turned_rows = None if self.turned is None else self.turned[0]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The table of `x`, a tensor of the first one's form; always in the same memory."""
        self.rows.copy_(self.recipe.part(x))
        if self.turned_rows is not None:
            self.turned_rows.bitwise_not_()
        self.wider.copy_(self.over(self.rows, self.dim, keepdim=True))
        for here, there, both in self.pairs:
            self.pick(here, there, out=both)
        if self.turned is not None:
            self.turned.bitwise_not_()
        return self.tensor
