"""Masks of which each row sees one run of keys: where it begins and ends, so that a test is two comparisons.

Bands say which tiles a query tile visits; the tiles at their ends are tested with the whole mask, element by element.
Where the mask is solved exactly and a row's keys are one run, the run's ends say the same: values that a kernel
computes once a row, with nothing to read or compute at an element.

Comparisons of captured tensors (document ids) give such runs only where equal values lie together, which their contents
decide. There `holds` is a value read at run time, one for all rows of a batch entry and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.expr import Expr, const, index, read, substitute, walk
from ..graph.linear import finish, larger, smaller
from ..graph.ops import apply
from .matches import END, FULL_END, FULL_START, START, Matches, without_gaps
from .saturated import saturated
from .solve import Piece, Row

_ZERO, _KV_LEN = const(0), index("kv_len")


@dataclass(frozen=True, eq=False)
class RowLimits:
    """Row q of (b, h) sees the keys of [begin, end) and no others, where `holds`; a bool of (b, h) alone.

    The ends may lie outside of [0, kv_len], and the run may be inverted, then it is empty.
    """

    begin: Expr
    end: Expr
    holds: Expr


ALL_KEYS = RowLimits(_ZERO, _KV_LEN, const(True))
"""No mask."""


def limits_of(found: list[Piece]) -> RowLimits | None:
    """The limits of the rows of a mask, solved exactly; None where it has none that can be told."""
    tables: dict[Expr, None] = {}
    runs = [run for p in found if (run := _run(p, tables)) is not None]
    if not runs or len(runs) < len(found):
        return None
    (begin, end), *others = runs
    for here, there in others:
        if begin is here:
            end = larger(end, there)
        elif end is there:
            begin = smaller(begin, here)
        else:
            return None  # two runs, for all that is known
    holds = const(True)
    for table in tables:
        holds = apply("and", holds, apply("ne", table, _ZERO))
    return RowLimits(saturated(finish(begin)), saturated(finish(end)), holds)


def _run(piece: Piece, tables: dict[Expr, None]) -> tuple[Expr, Expr] | None:
    """(begin, end) of what row q sees of a piece; None where the bounds that hide and those that show differ."""
    lows, highs = piece.bounds()
    begin, end = _ZERO, _KV_LEN
    for low in lows:
        outer, inner = _without_gaps(low.outer, tables), _without_gaps(low.inner, tables)
        if outer is not inner:
            return None
        begin = larger(begin, outer)
    for high in highs:
        outer, inner = _without_gaps(high.outer, tables), _without_gaps(high.inner, tables)
        if outer is not inner:
            return None
        end = smaller(end, outer)
    for row in (c for c in piece.constraints if isinstance(c, Row)):
        end = apply("where", apply(row.kind, row.value, _ZERO), end, _ZERO)
    return begin, end


def _without_gaps(e: Expr, tables: dict[Expr, None]) -> Expr:
    """`e` if the columns that match a row have no gaps; adds to `tables` the reads that say whether they have."""
    plain: dict[Expr, Expr] = {}
    for node in walk(e):
        if node.op == "read" and isinstance(node.attr, Matches):
            which, *at = node.args
            kind = {FULL_START: START, FULL_END: END}.get(int(which.attr))
            if kind is not None:
                plain[node] = read(node.attr, (const(kind), *at))
            tables[read(without_gaps(node.attr), tuple(at[:2]))] = None
    return substitute(e, plain) if plain else e
