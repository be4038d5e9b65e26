"""What an expression is never below or above on the rows of a tile, as expressions in the tile's first and last row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..graph.expr import Dep, DType, Expr, const, index
from ..graph.linear import Linear, answers, bounds, build, larger, linear, smaller
from ..graph.ops import apply
from .range_extremes import range_extreme

_ZERO, _Q = const(0), index("q")
_extremes: dict[tuple[Expr, Expr, Expr, bool], Expr | None] = answers()  # of first row, last row, expression, which


@dataclass
class RowRange:
    """Rows of the tile that a conjunction speaks of: first..last, those of the tile or fewer."""

    first: Expr
    last: Expr

    @property
    def is_one(self) -> bool:
        """Whether this is row q and no other."""
        return self.first is self.last is _Q

    def joined(self, join: Callable[[Expr, Expr], Expr], limit: Expr, ends: list[Expr | None]) -> Expr:
        """The known ends joined. A loop keeps inside of the sequence by itself; the test of a row needs `limit`."""
        known = [e for e in ends if e is not None]
        return functools.reduce(join, [limit, *known] if self.is_one or not known else known)

    def lowest(self, e: Expr) -> Expr | None:
        """A value that `e` is never below on these rows; None where there is no such expression."""
        return self._extreme(e, largest=False)

    def highest(self, e: Expr) -> Expr | None:
        return self._extreme(e, largest=True)

    def _extreme(self, e: Expr, largest: bool) -> Expr | None:
        """Interval arithmetic on expressions: exact where every term moves the same way with the row."""
        if self.is_one or not e.deps & Dep.Q:
            return e
        key = self.first, self.last, e, largest
        if key not in _extremes:  # parts that are shared are met again and again
            _extremes[key] = self._of_sum(linear(e), largest)
        return _extremes[key]

    def _of_sum(self, lin: Linear, largest: bool) -> Expr | None:
        total = Linear(lin.constant, {})
        for t, c in lin.terms.items():
            end = self._term(t, largest is (c > 0)) if t.deps & Dep.Q else t
            if end is None:
                return None
            total = total.plus(linear(end), c)
        return build(total)

    def _term(self, t: Expr, largest: bool) -> Expr | None:
        rule = _RULES.get(t.op)
        return None if rule is None else rule(self, t, largest)

    def _end(self, t: Expr, largest: bool) -> Expr:
        return self.last if largest else self.first

    def _quotient(self, t: Expr, largest: bool) -> Expr | None:
        x, n = t.args
        inside = self._extreme(x, largest) if n.is_const and n.attr > 0 else None
        return None if inside is None else apply("floordiv", inside, n)

    def _larger_of_both(self, t: Expr, largest: bool) -> Expr | None:
        x, y = (self._extreme(a, largest) for a in t.args)
        if x is None or y is None:  # it is at least either
            return None if largest else x if y is None else y
        return larger(x, y)

    def _smaller_of_both(self, t: Expr, largest: bool) -> Expr | None:
        x, y = (self._extreme(a, largest) for a in t.args)
        if x is None or y is None:  # it is at most either
            return (x if y is None else y) if largest else None
        return smaller(x, y)

    def _size(self, t: Expr, largest: bool) -> Expr | None:
        low, high = self._extreme(t.args[0], False), self._extreme(t.args[0], True)
        if low is None or high is None:
            return None if largest else _ZERO
        if largest:
            return larger(high, build(linear(low).times(-1)))
        return larger(_ZERO, larger(low, build(linear(high).times(-1))))

    def _choice(self, t: Expr, largest: bool) -> Expr | None:
        condition, *branches = t.args
        x, y = (self._extreme(b, largest) for b in branches)
        if x is None or y is None:
            return None
        if not condition.deps & Dep.Q:
            return apply("where", condition, x, y)
        return larger(x, y) if largest else smaller(x, y)

    def _remainder(self, t: Expr, largest: bool) -> Expr | None:
        x, n = t.args
        if not (n.is_const and n.attr > 0):
            return None
        low, high = self._extreme(x, False), self._extreme(x, True)
        limit = const(int(n.attr) - 1) if largest else _ZERO
        if low is None or high is None:
            return limit
        one_lap = apply("eq", apply("floordiv", low, n), apply("floordiv", high, n))
        return apply("where", one_lap, apply("mod", high if largest else low, n), limit)

    def _captured(self, t: Expr, largest: bool) -> Expr | None:
        """A tensor read at a position that moves with the row: its extreme over the positions of these rows."""
        moving = [d for d, i in enumerate(t.args) if i.deps & Dep.Q]
        if len(moving) != 1 or t.dtype is DType.FLOAT or t.attr.tensor.numel() == 0:
            return None
        d = moving[0]
        low, high = self._extreme(t.args[d], False), self._extreme(t.args[d], True)
        if low is None or high is None or bounds(t.args[d])[0] < 0:
            return None  # a negative position counts from the end
        others = (*t.args[:d], *t.args[d + 1 :])
        return range_extreme(t.attr, d, others, larger(low, _ZERO), high, largest)


# of each operation whose extremes are known
_RULES: dict[str, Callable[[RowRange, Expr, bool], Expr | None]] = {
    "index": RowRange._end, "floordiv": RowRange._quotient, "mod": RowRange._remainder, "abs": RowRange._size,
    "where": RowRange._choice,
    "maximum": RowRange._larger_of_both, "clamp_min": RowRange._larger_of_both, "read": RowRange._captured,
    "minimum": RowRange._smaller_of_both, "clamp_max": RowRange._smaller_of_both,
}  # fmt: skip

TILE, ROW = RowRange(index("first"), index("last")), RowRange(_Q, _Q)
"""The rows of a tile, and row q as a tile of one."""
