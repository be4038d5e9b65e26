"""Masks where each row sees one run of keys: where it begins and ends, so that a test is two comparisons.

Bands say which tiles a query tile visits; the tiles at their ends are tested with the whole mask, element by element.
Where the mask is solved exactly and a row's keys are one run, the run's ends say the same: values that a kernel
computes once per row, with nothing to read or compute at an element.

Comparisons of captured tensors (document ids) give such runs only where equal values lie together, which their contents
decide. There `holds` is a value read at run time, one for all rows of a batch entry and head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..graph.expr import Expr, const, index, read, walk
from ..graph.linear import linear
from ..graph.rebuilt import substitute
from .matches import Matches
from .matches import without_gaps as are_without_gaps
from .solve import Conjunction, Constraint, High, Low

_ZERO, _KV_LEN = const(0), index("kv_len")


@dataclass(frozen=True, eq=False)
class RowLimits:
    """Row q of (b, h) sees the keys of [begin, end) and no others, where `holds`; a bool of (b, h) alone.

    The ends may lie outside of [0, kv_len], and the run may be inverted, then it is empty. `most`: the most keys that
    any row sees, if constants of the mask alone say so.
    """

    begin: Expr
    end: Expr
    holds: Expr
    most: int | None = None


ALL_KEYS = RowLimits(_ZERO, _KV_LEN, const(True))
"""No mask."""


def most_keys(begin: Expr, end: Expr) -> int | None:
    """The most keys of a run with these ends (a window's width), as constants bound it; None if they don't."""
    begins, ends = _alternatives("maximum", begin), list(_alternatives("minimum", end))
    widths = [linear(last).plus(linear(first), -1) for first in begins for last in ends]
    return min((max(0, width.constant) for width in widths if width.is_const), default=None)


def _alternatives(op: str, end: Expr) -> Iterator[Expr]:
    """The values of which it is the greatest or the least, by `op`."""
    if end.op != op:
        yield end
        return
    for part in end.args:
        yield from _alternatives(op, part)


def without_gaps(conjunction: Conjunction, tables: dict[Expr, None]) -> Conjunction:
    """The conjunction where matching columns have no gaps; adds to `tables` the reads that say whether so."""
    plain: dict[Expr, Expr] = {}
    bounds = [c for c in conjunction.constraints if isinstance(c, (Low, High))]
    for node in walk(*(e for c in bounds for e in (c.outer, c.inner))):
        if node.op == "read" and isinstance(node.attr, Matches):
            which, *at = node.args
            plain[node] = read(node.attr, (const(node.attr.without_gaps(int(which.attr))), *at))
            tables[read(are_without_gaps(node.attr), tuple(at[:2]))] = None
    if not plain:
        return conjunction
    moved: dict[Constraint, Constraint] = {
        c: type(c)(substitute(c.outer, plain), substitute(c.inner, plain)) for c in bounds
    }
    return Conjunction(tuple(moved.get(c, c) for c in conjunction.constraints))
